"""Turns tensors, made one at a time, into safetensors shards with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from k3tvm.checkpoint.expected import TensorSpec
from k3tvm.checkpoint.index import INDEX_NAMES
from k3tvm.checkpoint.tensor_info import ITEM_SIZE

Array = np.ndarray[Any, Any]
Make = Callable[[TensorSpec], Array]


def write_shard(path: Path, specs: Sequence[TensorSpec], make: Make) -> None:
    """Write one shard in the published shapes and dtypes, holding one tensor in memory at a time.

    The file appears under its name only when it is whole.
    """
    order = sorted(specs, key=lambda spec: (-ITEM_SIZE[spec.dtypes[0]], spec.name))
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(_header(order))
        for spec in order:
            _write(file, spec, make(spec))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _write(file: BinaryIO, spec: TensorSpec, made: Array) -> None:
    data = np.ascontiguousarray(made)
    if data.shape != spec.shape or data.nbytes != spec.nbytes:
        raise ValueError(f"{spec.name}: made {data.shape} {data.dtype}, not {spec}")
    file.write(data.view(np.uint8).data)


def write_index(folder: Path, shards: Mapping[str, Iterable[TensorSpec]]) -> None:
    """Write the index that maps each tensor to its shard, with the total size in bytes."""
    names = {spec.name: shard for shard, specs in shards.items() for spec in specs}
    total = sum(spec.nbytes for specs in shards.values() for spec in specs)
    values = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    write_json(folder / INDEX_NAMES[0], values)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write indented JSON so that the name never stands for a partial file."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _header(order: Sequence[TensorSpec]) -> bytes:
    """Length and JSON header, padded with blanks so that the data starts at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in order:
        span = [end, end + spec.nbytes]
        entries[spec.name] = {
            "dtype": spec.dtypes[0],
            "shape": list(spec.shape),
            "data_offsets": span,
        }
        end = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
