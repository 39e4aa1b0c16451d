"""Describes one stored tensor: its dtype, shape and place, without its data."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# Bytes of one element for every dtype that a safetensors header may name. F8_E8M0 and U8 hold
# MXFP4 scales as the same bytes (specification 4).
ITEM_SIZE: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


class TensorInfo(NamedTuple):
    """What a shard's header says of one tensor; `offset` counts bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    offset: int
    nbytes: int
