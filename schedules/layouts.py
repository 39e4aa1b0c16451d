"""Weights [rows, k] into the packed layouts that kernels stream, and back, bit for bit.

All layouts hold blocks of 16 output rows with k running inside the block, so that a kernel reads
one contiguous stream and has 16 results in the lanes of one vector; rows are padded with zeros to
a multiple of 16. With b = row // 16 and r = row % 16:

    float32   [b, k, 16]     element r
    bfloat16  [b, k, 8]      uint32 words: low half is row r, high half is row r + 8
    mxfp4     [b, k/8, 16]   uint32 words of row r: byte j holds element j in its low nibble and
                             element j + 4 in its high nibble, of the eight k in this word
              [b, k/32, 16]  uint8 block scales
"""

from __future__ import annotations

import numpy as np

ROWS = 16


def _blocked(weight: np.ndarray) -> np.ndarray:
    """[..., rows, k] -> [..., ceil(rows/16), k, 16], zero padded."""
    *lead, rows, k = weight.shape
    blocks = -(-rows // ROWS)
    if blocks * ROWS != rows:
        pad = [(0, 0)] * len(lead) + [(0, blocks * ROWS - rows), (0, 0)]
        weight = np.pad(weight, pad)
    return weight.reshape(*lead, blocks, ROWS, k).swapaxes(-1, -2)


def _unblocked(packed: np.ndarray, rows: int) -> np.ndarray:
    *lead, blocks, k, _ = packed.shape
    return packed.swapaxes(-1, -2).reshape(*lead, blocks * ROWS, k)[..., :rows, :]


def pack_float32(weight: np.ndarray) -> np.ndarray:
    """float32 [..., rows, k] -> float32 [..., blocks, k, 16]."""
    return np.ascontiguousarray(_blocked(weight))


def unpack_float32(packed: np.ndarray, rows: int) -> np.ndarray:
    """Inverse of `pack_float32`."""
    return np.ascontiguousarray(_unblocked(packed, rows))


def pack_bfloat16(weight: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16 [..., rows, k] -> uint32 [..., blocks, k, 8]."""
    blocked = _blocked(weight)
    pairs = np.empty((*blocked.shape[:-1], 8, 2), np.uint16)
    pairs[..., 0] = blocked[..., :8]
    pairs[..., 1] = blocked[..., 8:]
    return pairs.view("<u4")[..., 0]


def unpack_bfloat16(packed: np.ndarray, rows: int) -> np.ndarray:
    """Inverse of `pack_bfloat16`: uint16 [..., rows, k]."""
    pairs = np.ascontiguousarray(packed)[..., None].view("<u2")
    blocked = np.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
    return np.ascontiguousarray(_unblocked(blocked, rows))


def pack_mxfp4(packed: np.ndarray) -> np.ndarray:
    """Checkpoint bytes uint8 [..., rows, k/2] -> uint32 [..., blocks, k/8, 16].

    The checkpoint holds elements 2j and 2j+1 in the nibbles of byte j (specification 4).
    """
    *lead, rows, half = packed.shape
    codes = np.empty((*lead, rows, half, 2), np.uint8)
    codes[..., 0] = packed & 15
    codes[..., 1] = packed >> 4
    eights = codes.reshape(*lead, rows, half // 4, 8)
    words = np.ascontiguousarray(eights[..., :4] | eights[..., 4:] << 4).view("<u4")[..., 0]
    return np.ascontiguousarray(_blocked(words))


def unpack_mxfp4(words: np.ndarray, rows: int) -> np.ndarray:
    """Inverse of `pack_mxfp4`: checkpoint bytes uint8 [..., rows, k/2]."""
    row_words = np.ascontiguousarray(_unblocked(words, rows))
    four = row_words[..., None].view("u1")
    codes = np.concatenate([four & 15, four >> 4], axis=-1)
    return (
        codes[..., 0::2].reshape(*codes.shape[:-2], -1)
        | codes[..., 1::2].reshape(*codes.shape[:-2], -1) << 4
    )


def pack_scales(scales: np.ndarray) -> np.ndarray:
    """Block scales uint8 [..., rows, k/32] -> uint8 [..., blocks, k/32, 16]."""
    return np.ascontiguousarray(_blocked(scales))


def unpack_scales(packed: np.ndarray, rows: int) -> np.ndarray:
    """Inverse of `pack_scales`."""
    return np.ascontiguousarray(_unblocked(packed, rows))
