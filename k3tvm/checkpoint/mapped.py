"""Turns a TensorInfo into a NumPy view of the memory-mapped shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3tvm.checkpoint.tensor_info import TensorInfo
from k3tvm.errors import CheckpointError

Array = np.ndarray[Any, Any]
# F8_E8M0 is the same byte as a U8 scale, and stays that byte.
NUMPY_TYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "U8": np.uint8,
    "F8_E8M0": np.uint8,
}


def view(info: TensorInfo, maps: dict[Path, Array]) -> Array:
    """Read-only array in stored shape and dtype; `maps` keeps one memory map a shard.

    Only an offset that the dtype cannot be read from in place costs a copy.
    """
    if info.dtype not in NUMPY_TYPES:
        cure = "convert the tensor to BF16 or F32"
        raise CheckpointError(
            f"tensors of type {info.dtype} are not read", where=info.name, cure=cure
        )
    if info.shard not in maps:
        maps[info.shard] = _open(info.shard)
    data: Array = maps[info.shard][info.offset : info.offset + info.nbytes]
    if data.nbytes != info.nbytes:
        what = "changed its length since its header was read"
        raise CheckpointError(
            what, where=str(info.shard), cure="let the download finish, then retry"
        )
    shaped: Array = np.asarray(data).view(NUMPY_TYPES[info.dtype]).reshape(info.shape)
    return shaped if shaped.flags.aligned else shaped.copy()


def _open(shard: Path) -> Array:
    try:
        return np.memmap(shard, np.uint8, mode="r")
    except (OSError, ValueError) as fault:
        what = f"can no longer be read ({fault})"
        raise CheckpointError(what, where=str(shard), cure="download the shard again") from None
