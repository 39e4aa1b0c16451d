"""Turns MXFP4 bytes into codes and float values, and back (specification 4).

Checkpoint layout of a [N, K] weight: `packed` uint8 [N, K/2], where byte j holds element 2j in
its low half and 2j+1 in its high half, and `scale` uint8 [N, K/32], an exponent biased by 127.
Scale 255 means NaN and is refused when a checkpoint is loaded; scale 0 is 2^-127, exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tvm.errors import CheckpointError

Bytes = NDArray[np.uint8]
GROUP = 32
SCALE_BIAS = 127
SCALE_NAN = 255
# E2M1: one sign bit, two exponent bits, one fraction bit; code 8 is minus zero.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array(MAGNITUDES + tuple(-value for value in MAGNITUDES), np.float32)
_BETWEEN = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def unpack(packed: Bytes) -> Bytes:
    """Codes 0..15 uint8 [..., K] from packed bytes uint8 [..., K/2]."""
    codes = np.stack((packed & 15, packed >> 4), axis=-1)
    return codes.reshape(*packed.shape[:-1], -1)


def pack(codes: Bytes) -> Bytes:
    """Packed bytes uint8 [..., K/2] from codes uint8 [..., K], K even."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)


def decode(packed: Bytes, scale: Bytes, dtype: Any = np.float32) -> NDArray[Any]:
    """Values [..., K] from packed uint8 [..., K/2] and scale uint8 [..., K/32].

    Exact in float64 for scales 0..254, and in float32 too where the value is below 2^128 (only
    scales 253 and 254 reach beyond, and become infinite). Scale 255 gives NaN.
    """
    values = VALUES.astype(dtype)[unpack(packed)]
    grouped = values.reshape(*scale.shape, GROUP)
    exponent = scale.astype(np.int32)[..., None] - SCALE_BIAS
    with np.errstate(over="ignore"):
        scaled = np.ldexp(grouped, exponent)
    scaled[scale == SCALE_NAN] = np.nan
    return scaled.reshape(values.shape)


def encode(values: NDArray[np.float32]) -> tuple[Bytes, Bytes]:
    """Nearest codes, ties to even, of float32 [..., K] as (packed, scale); K a multiple of 32.

    The scale puts the group's largest magnitude into [4, 8); what lies above 6 becomes 6.
    """
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    _, exponent = np.frexp(np.abs(groups).max(axis=-1))
    scale = np.clip(exponent - 3 + SCALE_BIAS, 0, SCALE_NAN - 1)
    scaled = np.ldexp(groups, (SCALE_BIAS - scale)[..., None])
    magnitude = np.abs(scaled)
    code = np.searchsorted(_BETWEEN, magnitude)
    tie_above = (magnitude == _BETWEEN[np.minimum(code, 6)]) & (code % 2 == 1)
    code = (code + tie_above) | np.where(np.signbit(scaled), 8, 0)
    return pack(code.astype(np.uint8).reshape(values.shape)), scale.astype(np.uint8)


def check_scales(scale: Bytes, name: str) -> None:
    """Refuse a scale of 255, which stands for NaN, with a CheckpointError that names the tensor."""
    if scale.size and int(scale.max()) == SCALE_NAN:
        raise CheckpointError(
            f"{int((scale == SCALE_NAN).sum())} scales are 255, which means NaN",
            where=name,
            cure="download the shard again; if it stays, the checkpoint was exported wrongly",
        )


def to_ggml_blocks(packed: Bytes, scale: Bytes) -> Bytes:
    """ggml's blocks uint8 [..., K/32, 17]: the scale, then 16 bytes that pair j with j+16."""
    codes = unpack(packed).reshape(*scale.shape, GROUP)
    paired = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate((scale[..., None], paired), axis=-1).astype(np.uint8)


def from_ggml_blocks(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """(packed, scale) in checkpoint layout from ggml's blocks uint8 [..., K/32, 17]."""
    paired = blocks[..., 1:]
    codes = np.concatenate((paired & 15, paired >> 4), axis=-1)
    return pack(codes.reshape(*blocks.shape[:-2], -1)), blocks[..., 0].copy()
