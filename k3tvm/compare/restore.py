"""The arrays of a bundle back into checkpoint tensors, bit for bit: the inverse of every recipe.

Two recipes lose what has no influence: of res_norm * res_proj only the product is kept, and of
A_log its exponential. They come back as (product, ones) and as the logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from k3tvm.bundle.manifest import ArrayEntry
from k3tvm.checkpoint.expected import expected_tensors
from k3tvm.relax_models.config import ModelConfig
from k3tvm.schedules import layouts

Array = np.ndarray[Any, Any]
Read = Callable[[], Array]


@dataclass(frozen=True)
class Stored:
    """One array of the bundle and its description."""

    entry: ArrayEntry
    array: Array


class BundleTensors(Mapping[str, Array]):
    """A bundle's parameters by checkpoint name, restored when they are asked for."""

    def __init__(
        self, config: ModelConfig, entries: tuple[ArrayEntry, ...], arrays: list[Array]
    ) -> None:
        self.shapes = {s.name: s.shape for s in expected_tensors(config)}
        self.config = config
        self._kv_b: dict[str, dict[str, Array]] = {}
        self.readers: dict[str, Read] = {}
        for entry, array in zip(entries, arrays, strict=True):
            self.readers |= self._readers_of(Stored(entry, array))

    def __getitem__(self, name: str) -> Array:
        return self.readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)

    def _readers_of(self, s: Stored) -> dict[str, Read]:
        return {
            "vector": self._vector,
            "product": self._product,
            "exp_heads": self._exp_heads,
            "conv": self._conv,
            "table": self._table,
            "rows": self._rows,
            "absorb_key": self._absorb,
            "absorb_value": self._absorb,
            "expert_rows": self._expert_rows,
            "zeros": lambda s: {},
        }[s.entry.recipe](s)

    def _vector(self, s: Stored) -> dict[str, Read]:
        name = s.entry.sources[0]
        return {name: lambda: s.array.reshape(self.shapes[name])}

    def _product(self, s: Stored) -> dict[str, Read]:
        norm, proj = s.entry.sources
        ones = np.ones(self.shapes[proj], np.float32)
        return {norm: lambda: s.array, proj: lambda: ones}

    def _exp_heads(self, s: Stored) -> dict[str, Read]:
        return {s.entry.sources[0]: lambda: np.log(s.array.astype(np.float64))}

    def _conv(self, s: Stored) -> dict[str, Read]:
        channels = [self.shapes[n][0] for n in s.entry.sources]
        parts = _spans(s.entry.sources, channels)

        def read(name: str, start: int, stop: int) -> Array:
            return s.array[:, start:stop].T.reshape(self.shapes[name])

        return {n: partial(read, n, a, b) for n, a, b in parts}

    def _table(self, s: Stored) -> dict[str, Read]:
        raw = s.array.view(ml_dtypes.bfloat16) if s.array.dtype == np.uint16 else s.array
        return {f"{s.entry.sources[0]}.weight": lambda: raw}

    def _rows(self, s: Stored) -> dict[str, Read]:
        names = [stem + _suffix(s.array) for stem in s.entry.sources]
        counts = [self.shapes[n][0] for n in names]
        total = sum(counts)
        return {n: partial(_part, s.array, total, a, b) for n, a, b in _spans(names, counts)}

    def _expert_rows(self, s: Stored) -> dict[str, Read]:
        readers: dict[str, Read] = {}
        for e in range(s.array.shape[0]):
            stems = [source.replace("{expert}", str(e)) for source in s.entry.sources]
            names = [stem + _suffix(s.array) for stem in stems]
            counts = [self.shapes[n][0] for n in names]
            total = sum(counts)
            for n, a, b in _spans(names, counts):
                readers[n] = partial(_part, s.array[e], total, a, b)
        return readers

    def _absorb(self, s: Stored) -> dict[str, Read]:
        """kv_b needs both of its halves; the second one to come completes the reader."""
        name = f"{s.entry.sources[0]}.weight"
        half = "key" if s.entry.recipe == "absorb_key" else "value"
        halves = self._kv_b.setdefault(name, {})
        halves[half] = s.array
        return {name: lambda: self._join(halves, name)}

    def _join(self, halves: dict[str, Array], name: str) -> Array:
        c = self.config
        lead = (c.num_heads,)
        key, value = (halves[h].reshape(*lead, *halves[h].shape[-3:]) for h in ("key", "value"))
        keys = _unpack(key, c.kv_lora_rank).swapaxes(1, 2)
        both = np.concatenate([keys, _unpack(value, c.v_head_dim)], axis=1)
        return np.ascontiguousarray(both.reshape(self.shapes[name]))


def _spans(names: Any, counts: list[int]) -> list[tuple[str, int, int]]:
    ends = np.cumsum(counts).tolist()
    return [(n, e - c, e) for n, c, e in zip(names, counts, ends, strict=True)]


def _part(array: Array, rows: int, start: int, stop: int) -> Array:
    return _unpack(array, rows)[start:stop]


def _suffix(array: Array) -> str:
    if array.dtype == np.uint8:
        return ".weight_scale"
    return ".weight_packed" if _is_mxfp4(array) else ".weight"


def _is_mxfp4(array: Array) -> bool:
    return array.dtype == np.uint32 and array.shape[-1] == layouts.ROWS


def _unpack(array: Array, rows: int) -> Array:
    if array.dtype == np.float32:
        return layouts.unpack_float32(array, rows)
    if array.dtype == np.uint8:
        return layouts.unpack_scales(array, rows)
    if _is_mxfp4(array):
        return layouts.unpack_mxfp4(array, rows)
    return layouts.unpack_bfloat16(array, rows).view(ml_dtypes.bfloat16)
