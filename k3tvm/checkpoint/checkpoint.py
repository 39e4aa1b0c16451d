"""Turns a checkpoint folder into a checked index and memory-mapped tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from k3tvm.checkpoint import a_log, names
from k3tvm.checkpoint.collector import paused
from k3tvm.checkpoint.expected import TensorSpec, expected_tensors
from k3tvm.checkpoint.index import Contents, read_folder
from k3tvm.checkpoint.tensor_info import TensorInfo
from k3tvm.errors import CheckpointError
from k3tvm.relax_models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np

# How much was on disk: shards, names only (an index), or the configuration alone.
Source = Literal["data", "index", "config"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint beside its configuration; `open` makes one, `check` refuses what does not fit.

    `specs` are the tensors that the configuration asks for, `tensors` those whose headers were
    read (empty without shards). `missing`, `unexpected` and `skipped` are sorted names, `misfits`
    says which tensor has a wrong shape or dtype, and how.
    """

    path: Path
    source: Source
    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    tensors: dict[str, TensorInfo]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    misfits: tuple[str, ...]
    total_size: int | None  # as the index states it, of all tensors
    _maps: dict[Path, np.ndarray[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    @paused()
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a folder, or a `config.json` by itself; no tensor data is read.

        Raises ConfigError for the configuration and CheckpointError for unreadable or
        contradictory files. Tensors that do not fit the configuration are only noted here.
        """
        root = Path(path)
        config = ModelConfig.from_file(root)
        empty = Contents(frozenset(), {}, None, has_index=False)
        contents = read_folder(root) if root.is_dir() else empty
        if contents.names:
            packed = any(name.endswith(".weight_packed") for name in contents.names)
            config = replace(config, mxfp4_experts=packed and config.num_experts > 0)
        return _compare(root, config, contents)

    @property
    def has_data(self) -> bool:
        """Whether the shards are there, so that `tensor` can work."""
        return self.source == "data"

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The expected tensors by name."""
        return {spec.name: spec for spec in self.specs}

    def check(self) -> None:
        """Raise a CheckpointError with count, first names and likely cause unless all fits."""
        from k3tvm.checkpoint.diagnosis import explain

        if self.missing or self.unexpected or self.misfits:
            what, cure = explain(self)
            raise CheckpointError(what, where=str(self.path), cure=cure)

    def nbytes(self, spec: TensorSpec) -> int:
        """Stored bytes of an expected tensor; without headers, those of the published form."""
        info = self.tensors.get(spec.name)
        return info.nbytes if info else spec.nbytes

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor as stored: a read-only memory map in its stored shape.

        BF16 comes as ml_dtypes.bfloat16, F32 as float32, U8 and F8_E8M0 as uint8. Refuses with a
        CheckpointError an A_log with values beyond its heads and an MXFP4 scale of 255.
        """
        from k3tvm.checkpoint import mxfp4
        from k3tvm.checkpoint.mapped import view

        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"tensor {name!r} cannot be read",
                where=str(self.path),
                cure=(
                    "the name is not in the checkpoint" if self.has_data else "download the shards"
                ),
            )
        data = view(info, self._maps)
        if name.endswith(".weight_scale"):
            mxfp4.check_scales(data, name)
        if name.endswith(".A_log"):
            a_log.per_head(data, self.config.kda_heads, name)
        return data


def _compare(root: Path, config: ModelConfig, contents: Contents) -> Checkpoint:
    specs = expected_tensors(config)
    wanted = {spec.name for spec in specs}
    extra = contents.names - wanted
    skipped = {name for name in extra if is_skipped(name, config)}
    named = contents.has_index or bool(contents.tensors)
    return Checkpoint(
        path=root,
        source="data" if contents.tensors else "index" if named else "config",
        config=config,
        specs=specs,
        tensors=contents.tensors,
        missing=tuple(sorted(wanted - contents.names)) if named else (),
        unexpected=tuple(sorted(extra - skipped)),
        skipped=tuple(sorted(skipped)),
        misfits=tuple(_misfits(specs, contents.tensors, config)),
        total_size=contents.total_size,
    )


def is_skipped(name: str, config: ModelConfig) -> bool:
    """Whether the text model ignores a tensor by rule: image side and extra prediction layers."""
    if name.startswith(names.SKIPPED_PREFIXES):
        return True
    start = f"{config.tensor_prefix}model.layers."
    number = name.removeprefix(start).partition(".")[0] if name.startswith(start) else ""
    first, count = config.num_layers, config.num_mtp_layers
    return number.isdecimal() and first <= int(number) < first + count


def _misfits(
    specs: Iterable[TensorSpec], tensors: dict[str, TensorInfo], config: ModelConfig
) -> Iterable[str]:
    for spec in specs:
        info = tensors.get(spec.name)
        if info is None:
            continue
        if spec.role == "kda.a_log":
            fits = a_log.fits(info.shape, config.kda_heads)
        else:
            fits = info.shape == spec.shape
        if not fits:
            yield f"{spec.name} has shape {list(info.shape)}, not {list(spec.shape)}"
        elif info.dtype not in spec.dtypes:
            yield f"{spec.name} is {info.dtype}, not {' or '.join(spec.dtypes)}"
