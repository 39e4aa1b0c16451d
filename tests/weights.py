"""Turns a format and a shape into packed kernel arguments and the float64 matrix they mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3tvm.relax_models.operators import WeightFormat
from k3tvm.schedules import layouts
from k3tvm.schedules.numerics import bfloat16_values, mxfp4_values

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Weight:
    """A random matrix: `arrays` as a kernel takes it, `values` float64 [*lead, rows, k]."""

    arrays: Arrays
    values: np.ndarray


def random_weight(
    rng: np.random.Generator, fmt: WeightFormat, lead: tuple[int, ...], rows: int, k: int
) -> Weight:
    """A weight with a spread of about k^-0.5; MXFP4 has all codes and scales that differ."""
    if fmt == "mxfp4":
        codes = rng.integers(0, 256, (*lead, rows, k // 2)).astype(np.uint8)
        scales = rng.integers(118, 125, (*lead, rows, k // 32)).astype(np.uint8)
        return mxfp4_weight(codes, scales)
    values = (rng.standard_normal((*lead, rows, k)) / k**0.5).astype(np.float32)
    if fmt == "float32":
        return Weight({"weight": layouts.pack_float32(values)}, values.astype(np.float64))
    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Weight({"weight": layouts.pack_bfloat16(raw)}, bfloat16_values(raw))


def mxfp4_weight(packed: np.ndarray, scales: np.ndarray) -> Weight:
    """Checkpoint bytes (specification 4) as a kernel takes them."""
    arrays = {"weight": layouts.pack_mxfp4(packed), "weight_scale": layouts.pack_scales(scales)}
    return Weight(arrays, mxfp4_values(packed, scales))


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """E2M1 codes uint8 [..., k] as checkpoint bytes [..., k/2]: element 2j in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def share_of_magnitude(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray) -> float:
    """Largest |got - want| in units of `magnitude`, the sum of |w| |x| of each product sum.

    Cancellation makes the sum itself small but not its roundings, so this and not the result is
    what an error bound can be stated in. NaN in `got` gives infinity.
    """
    if not np.isfinite(got).all():
        return float("inf")
    return float((np.abs(got - want) / np.maximum(magnitude, 1e-30)).max(initial=0.0))
