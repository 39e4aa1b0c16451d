"""Turns the header of a safetensors file into TensorInfo records; no tensor data is read."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from k3tvm.checkpoint.tensor_info import ITEM_SIZE, TensorInfo
from k3tvm.errors import CheckpointError
from k3tvm.strict_json import parse_object

LARGEST_HEADER = 100_000_000  # the limit that the format's own library sets
AGAIN = "download the shard again"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one shard by name, in order of their place in the file.

    Checks that the data areas tile the rest of the file exactly: no overlap, no hole, nothing
    beyond the end. Every fault is a CheckpointError that names the shard. Symbolic links are
    followed, so snapshots of links into a blob store work.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                _refuse(path, f"cut short: its {size} bytes do not hold its header")
            if length > LARGEST_HEADER:
                _refuse(path, f"claims a header of {length} bytes, which is not plausible")
            text = file.read(length)
    except FileNotFoundError:
        kind = "is a link that leads nowhere" if path.is_symlink() else "does not exist"
        _refuse(path, f"shard {kind}")
    except OSError as fault:
        _refuse(path, f"cannot be read ({fault.strerror})", "check the path and its permissions")
    entries = parse_object(text, str(path), CheckpointError)
    entries.pop("__metadata__", None)
    found = [_entry(path, name, entry, 8 + length) for name, entry in entries.items()]
    found.sort(key=lambda info: (info.offset, info.nbytes))
    _check_tiling(path, found, 8 + length, size)
    return {info.name: info for info in found}


def _entry(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        _refuse(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _sizes(shape) or not _sizes(span) or len(span) != 2:
        _refuse(path, f"the header entry of tensor {name!r} is malformed")
    nbytes = span[1] - span[0]
    if nbytes != math.prod(shape) * ITEM_SIZE[dtype]:
        _refuse(path, f"tensor {name!r} spans {nbytes} bytes, which is not {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), path, base + span[0], nbytes)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(path: Path, found: list[TensorInfo], base: int, size: int) -> None:
    end = base
    for info in found:
        if info.offset != end:
            kind = "overlaps the one before it" if info.offset < end else "leaves a hole before it"
            _refuse(path, f"tensor {info.name!r} {kind}")
        end += info.nbytes
    if size < end:
        _refuse(path, f"cut short: {size} bytes of {end}")
    if size > end:
        _refuse(path, f"{size - end} bytes longer than its header describes")


def _refuse(path: Path, what: str, cure: str = AGAIN) -> NoReturn:
    raise CheckpointError(what, where=str(path), cure=cure)
