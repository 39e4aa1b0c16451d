"""Packed weight layouts: exact inverses; MXFP4 codes and scales through kernels (F13, F14)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from k3tvm.relax_models.operators import ExpertLinear, Linear, Operator, WeightFormat, weight_args
from k3tvm.schedules import layouts
from k3tvm.schedules.profile import TargetProfile
from tests.kernels import profiles, run
from tests.weights import mxfp4_weight, pack_codes, random_weight

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
SHAPES = pytest.mark.parametrize(
    ("lead", "rows", "k"),
    [((), 1, 32), ((), 16, 64), ((), 17, 96), ((3,), 31, 32), ((2, 5), 7, 160)],
)
# Written out here, by hand from the table of specification 4, and not taken from the code.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
ONE = 127  # the scale byte of 2^0


@SHAPES
@pytest.mark.parametrize("dtype", ["float32", "uint16", "codes", "scales"])
def test_packing_has_an_exact_inverse(lead: tuple[int, ...], rows: int, k: int, dtype: str) -> None:
    """Every bit comes back, for rows that fill no block and with leading dimensions."""
    layouts_of: dict[str, tuple[Any, Any, int, Any]] = {
        "float32": (layouts.pack_float32, layouts.unpack_float32, k, np.uint32),
        "uint16": (layouts.pack_bfloat16, layouts.unpack_bfloat16, k, np.uint16),
        "codes": (layouts.pack_mxfp4, layouts.unpack_mxfp4, k // 2, np.uint8),
        "scales": (layouts.pack_scales, layouts.unpack_scales, k // 32, np.uint8),
    }
    pack, unpack, width, kind = layouts_of[dtype]
    top = np.iinfo(kind).max
    raw = np.random.default_rng(rows).integers(0, top, (*lead, rows, width), kind, endpoint=True)
    packed = pack(raw.view(np.float32) if dtype == "float32" else raw)
    back = unpack(packed, rows)
    np.testing.assert_array_equal(back.view(kind), raw)
    np.testing.assert_array_equal(pack(back), packed)


@SHAPES
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "mxfp4"])
def test_packed_shapes_are_those_that_the_operators_declare(
    lead: tuple[int, ...], rows: int, k: int, fmt: WeightFormat
) -> None:
    arrays = random_weight(np.random.default_rng(0), fmt, lead, rows, k).arrays
    declared = {a.name: (a.shape, a.dtype) for a in weight_args("weight", lead, rows, k, fmt)}
    assert {n: (a.shape, a.dtype.name) for n, a in arrays.items()} == declared


@pytest.mark.parametrize("rows", [1, 15, 17])
def test_rows_are_padded_with_zeros(rows: int) -> None:
    """A kernel computes whole blocks, so garbage in the padding could raise a NaN."""
    packed = layouts.pack_float32(np.ones((rows, 5), np.float32))
    padded = layouts.unpack_float32(packed, packed.shape[0] * layouts.ROWS)
    assert (padded[:rows] == 1).all() and not padded[rows:].any()


def one_expert(op: ExpertLinear, rows: int) -> dict[str, np.ndarray]:
    """Routing of `rows` rows that all choose expert 1 of two; one expert keeps the call small."""
    del op
    order = np.arange(rows, dtype=np.int32)[:, None]
    chosen = np.ones((rows, 1), np.int32)
    return {"chosen": chosen, "first": np.array([0, 0, rows], np.int32), "order": order}


def product(
    op: Operator, profile: TargetProfile, packed: np.ndarray, scales: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """x times an MXFP4 matrix through the kernel of `op`."""
    weight = mxfp4_weight(packed, scales).arrays
    if isinstance(op, ExpertLinear):
        weight = {n: np.stack([np.full_like(a, 85), a]) for n, a in weight.items()}
        weight |= one_expert(op, len(x))
    return run(op, profile, {"x": x} | weight)["out"]


def in_calls_of(rows: int, op: Operator, profile: TargetProfile, *args: np.ndarray) -> np.ndarray:
    """The product taken `rows` rows of x at a time: few take another path than many."""
    packed, scales, x = args
    parts = [product(op, profile, packed, scales, x[i : i + rows]) for i in range(0, len(x), rows)]
    return np.concatenate(parts)


def operators(rows: int, k: int) -> list[Operator]:
    return [
        Linear(rows, k, "mxfp4", "float32", x_width=k),
        ExpertLinear(2, 1, rows, k, "mxfp4", False, k, 0, "float32"),
    ]


@PROFILES
@pytest.mark.parametrize("op", operators(40, 64), ids=lambda op: op.name)
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_f13_every_code_at_every_place_is_its_number(
    profile: TargetProfile, op: Operator, rows: int
) -> None:
    """One-hot rows read the matrix: all codes at all 64 places of two groups, in every lane."""
    codes = (np.arange(64) + np.arange(40)[:, None]).astype(np.uint8) % 16
    scales = np.full((40, 2), ONE, np.uint8)
    got = in_calls_of(rows, op, profile, pack_codes(codes), scales, np.eye(64, dtype=np.float32))
    np.testing.assert_array_equal(got, np.array(E2M1, np.float32)[codes].T)


@PROFILES
@pytest.mark.parametrize("op", operators(255 * 16, 32), ids=lambda op: op.name)
@pytest.mark.parametrize("rows", [1, 2, 32])
def test_f14_every_scale_times_every_code_is_exact(
    profile: TargetProfile, op: Operator, rows: int
) -> None:
    """255 scales x 16 codes, each alone in a row at a place of its own, times 1.0.

    A scale is 2^(byte - 127), byte 0 the subnormal 2^-127. Products beyond float32 (bytes 253 and
    254 with large codes) are infinite. Byte 255 is refused when the checkpoint is read.
    """
    pairs = np.arange(255 * 16)
    code, scale, place = pairs % 16, pairs // 16, (pairs * 7 + pairs // 16) % 32
    codes = np.zeros((len(pairs), 32), np.uint8)
    codes[pairs, place] = code
    exact = np.array(E2M1)[code] * np.ldexp(1.0, scale - 127)
    with np.errstate(over="ignore"):
        want = exact.astype(np.float32)
    assert np.isfinite(want).sum() == 255 * 16 - 2 * 2 - 2 * 4
    args = (pack_codes(codes), scale[:, None].astype(np.uint8), np.eye(32, dtype=np.float32))
    got = in_calls_of(rows, op, profile, *args)
    np.testing.assert_array_equal(got[place, pairs], want)
    elsewhere = np.ones((32, len(pairs)), bool)
    elsewhere[place, pairs] = False
    finite = np.broadcast_to(np.isfinite(want), elsewhere.shape)
    assert not got[elsewhere & finite].any()
