"""NumPy helpers that the references share: bfloat16 rounding and packed weights as float64."""

from __future__ import annotations

import numpy as np

from k3tvm.relax_models.operators import Activation, WeightFormat
from k3tvm.schedules import layouts

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def round_to(act: Activation, x: np.ndarray) -> np.ndarray:
    """Round float64 values as activations of dtype `act` are stored; float32 not at all."""
    if act == "float32":
        return x
    if act == "float16":
        with np.errstate(over="ignore"):  # beyond 65504 is infinity
            return x.astype(np.float32).astype(np.float16).astype(np.float64)
    single = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (single >> 16) & 1
    up = ((single + 0x7FFF + odd) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(x), up, x).astype(np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in float64 without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def bfloat16_values(raw: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float64."""
    return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def mxfp4_values(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Checkpoint MXFP4 (uint8 [..., rows, k/2] and [..., rows, k/32]) as float64 [..., rows, k]."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = E2M1[codes].reshape(*scales.shape, 32)
    return (values * np.ldexp(1.0, scales.astype(np.int64) - 127)[..., None]).reshape(codes.shape)


def unpack_weight(
    fmt: WeightFormat, weight: np.ndarray, scale: np.ndarray | None, rows: int
) -> np.ndarray:
    """A packed weight (`k3tvm.schedules.layouts`) as float64 [..., rows, k]."""
    if fmt == "float32":
        return layouts.unpack_float32(weight, rows).astype(np.float64)
    if fmt == "bfloat16":
        return bfloat16_values(layouts.unpack_bfloat16(weight, rows))
    if scale is None:
        raise ValueError("an MXFP4 weight needs its scales")
    return mxfp4_values(layouts.unpack_mxfp4(weight, rows), layouts.unpack_scales(scale, rows))
