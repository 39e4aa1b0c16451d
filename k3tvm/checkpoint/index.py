"""Turns a checkpoint folder into a map from tensor names to shards, with or without an index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3tvm.checkpoint.listing import some
from k3tvm.checkpoint.reader import read_header
from k3tvm.checkpoint.tensor_info import TensorInfo
from k3tvm.errors import CheckpointError
from k3tvm.strict_json import read_object

INDEX_NAMES = ("model.safetensors.index.json", "model.safetensors.index.json.gz")
# Formats that run code while they are read. They are never opened.
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Contents:
    """What a folder holds: `names` of all tensors, and `tensors` where headers could be read."""

    names: frozenset[str]
    tensors: dict[str, TensorInfo]
    total_size: int | None
    has_index: bool


def read_folder(folder: Path) -> Contents:
    """Index and headers of a folder; without any shard only names, without index and shards none.

    Raises CheckpointError when index and shards contradict each other, when some but not all
    shards are there, when a shard is damaged, or when there are pickled weights only.
    """
    files = [folder / name for name in INDEX_NAMES if (folder / name).exists()]
    if files:
        return _with_index(folder, files[0])
    single = folder / "model.safetensors"
    shards = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not shards:
        _refuse_pickled(folder)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        _merge(tensors, read_header(shard), shard)
    return Contents(frozenset(tensors), tensors, None, has_index=False)


def _with_index(folder: Path, index: Path) -> Contents:
    values = read_object(index, CheckpointError)
    weight_map = values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no 'weight_map'", where=str(index), cure="download it again")
    names = sorted(_shard_names(weight_map, index))
    present = [name for name in names if (folder / name).exists()]
    total = _total_size(values)
    if not present and not any((folder / name).is_symlink() for name in names):
        _refuse_pickled(folder)
        return Contents(frozenset(weight_map), {}, total, has_index=True)
    absent = [name for name in names if name not in set(present)]
    if absent:
        what = f"{len(absent)} of {len(names)} shards are missing: {some(absent)}"
        raise CheckpointError(what, where=str(folder), cure="download the missing shards")
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        header = read_header(folder / name)
        _compare(weight_map, header, name, index)
        tensors |= header
    _check_all_found(weight_map, tensors, index)
    return Contents(frozenset(weight_map), tensors, total, has_index=True)


def _shard_names(weight_map: dict[str, Any], index: Path) -> set[str]:
    """The distinct shards; a name that is not a plain file name could lead out of the folder."""
    shards = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    for name in shards:
        plain = name == Path(name).name and not set(name) & set("/\\:\0")
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"names the shard {name!r}, which is not a plain *.safetensors file name",
                where=str(index),
                cure="shards must lie beside the index; get the checkpoint from a trusted source",
            )
    return shards


def _total_size(values: dict[str, Any]) -> int | None:
    metadata = values.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) and not isinstance(size, bool) else None


def _compare(
    weight_map: dict[str, str], header: dict[str, TensorInfo], shard: str, index: Path
) -> None:
    strange = [name for name in header if weight_map.get(name) != shard]
    doubled = [name for name in strange if name in weight_map]
    if doubled:
        what = (
            f"tensor {doubled[0]!r} is in {shard} and, says the index, in {weight_map[doubled[0]]}"
        )
        raise CheckpointError(
            what, where=str(index), cure="shards and index must be of one version"
        )
    if strange:
        what = f"{shard} holds {len(strange)} tensors that the index does not name: {some(strange)}"
        raise CheckpointError(
            what, where=str(index), cure="shards and index must be of one version"
        )


def _check_all_found(
    weight_map: dict[str, str], tensors: dict[str, TensorInfo], index: Path
) -> None:
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        what = f"{len(lost)} tensors are not in the shards that it names: {some(lost)}"
        raise CheckpointError(
            what, where=str(index), cure="shards and index must be of one version"
        )


def _merge(tensors: dict[str, TensorInfo], header: dict[str, TensorInfo], shard: Path) -> None:
    for name in header:
        if name in tensors:
            what = f"tensor {name!r} is also in {tensors[name].shard.name}"
            raise CheckpointError(what, where=str(shard), cure="remove the shard that is not meant")
    tensors |= header


def _refuse_pickled(folder: Path) -> None:
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise CheckpointError(
            f"has pickled weights only ({some(pickled)}), which could run code when read",
            where=str(folder),
            cure="convert them to safetensors on a machine you can afford to lose",
        )
