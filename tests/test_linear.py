"""The Linear kernel against float64: odd shapes, all formats and profiles, few and many rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tvm.compiler.targets.vulkan import vulkan_profile
from k3tvm.errors import TargetError
from k3tvm.relax_models.operators import Activation, Linear, WeightFormat
from k3tvm.schedules import registry
from k3tvm.schedules.profile import TargetProfile
from tests.kernels import expect, gpu_profiles, host_profiles, profiles, relative_error, run
from tests.tolerances import tolerance
from tests.weights import Weight, random_weight, share_of_magnitude

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
ALL_FORMATS = ("float32", "bfloat16", "mxfp4")
FORMATS = pytest.mark.parametrize("fmt", ALL_FORMATS)
# rows, k, groups, addends: rows that fill no block, k that fills no vector, one matrix per head
SHAPES = [(5, 32, 1, 0), (16, 64, 1, 1), (35, 96, 1, 2), (70, 320, 3, 0)]
ODD_K = [(1, 1, 1, 0), (33, 131, 2, 1)]  # not for MXFP4: groups of 32
CASES = [(fmt, s) for fmt in ALL_FORMATS for s in SHAPES + (ODD_K if fmt != "mxfp4" else [])]
# Each operator is four kernels on a GPU, which a software GPU compiles slowly: fewer shapes there.
GPU_CASES = [("mxfp4", SHAPES[3]), ("bfloat16", ODD_K[1]), ("float32", ODD_K[1])]
ALL_CASES = [(p, *case) for p in host_profiles() for case in CASES]
ALL_CASES += [(p, *case) for p in gpu_profiles() for case in GPU_CASES]
COUNTS = {"cpu": [*range(1, 18), 23, 29, 40], "gpu": [1, 2, 3, 4, 5, 16, 17, 32, 33]}
FEW = {"cpu": 3, "gpu": 16}  # the path for few rows ends here
FEW_ALIKE = {"cuda": {"bfloat16": 4}}  # here, where tensor cores take over that add in another way


def operator(fmt: WeightFormat, rows: int, k: int, groups: int = 1, addends: int = 0) -> Linear:
    """x is wider than what is read, starts at column 3, and groups are two columns apart."""
    width = 3 + groups * (k + 2) + 1
    return Linear(rows, k, fmt, "float32", width, 3, groups, k + 2, addends)


def inputs(op: Linear, count: int, weight: Weight, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {"x": rng.standard_normal((count, op.x_width)).astype(np.float32)} | weight.arrays
    shape = (count, op.groups * op.rows)
    for i in range(op.addends):
        made[f"addend{i}"] = rng.standard_normal(shape).astype(np.float32)
    return made


def weight_of(op: Linear, seed: int = 0) -> Weight:
    lead = (op.groups,) if op.groups > 1 else ()
    return random_weight(np.random.default_rng(seed), op.fmt, lead, op.rows, op.k)


def magnitude(op: Linear, weight: Weight, given: dict[str, np.ndarray]) -> np.ndarray:
    """sum |w| |x| of every product sum, plus |addends|."""
    w = np.abs(weight.values).reshape(op.groups, op.rows, op.k)
    x, starts = np.abs(given["x"]).astype(np.float64), range(op.groups)
    parts = [x[:, op.x_offset + g * op.x_stride :][:, : op.k] @ w[g].T for g in starts]
    return np.concatenate(parts, axis=1) + sum(
        np.abs(given[f"addend{i}"]) for i in range(op.addends)
    )


def error(
    op: Linear, profile: TargetProfile, weight: Weight, given: dict[str, np.ndarray]
) -> float:
    got, want = run(op, profile, given)["out"], expect(op, given)["out"]
    return share_of_magnitude(got, want, magnitude(op, weight, given))


@pytest.mark.parametrize(
    ("profile", "fmt", "shape"), ALL_CASES, ids=lambda v: getattr(v, "name", str(v))
)
def test_product_sums_for_one_row_and_many(
    profile: TargetProfile, fmt: WeightFormat, shape: tuple[int, int, int, int]
) -> None:
    """F4 as well: one row, two, and the borders between the paths for few and many."""
    op = operator(fmt, *shape)
    weight = weight_of(op)
    for count in COUNTS[profile.family]:
        assert error(op, profile, weight, inputs(op, count, weight, count)) <= tolerance(
            "product_sum"
        ), count


@PROFILES
@FORMATS
@pytest.mark.parametrize("k", [1024, 4096])
def test_the_error_does_not_grow_with_k(profile: TargetProfile, fmt: WeightFormat, k: int) -> None:
    op = operator(fmt, 48, k)
    weight = weight_of(op, k)
    for count in (1, 13):
        given = inputs(op, count, weight, k)
        assert error(op, profile, weight, given) <= tolerance("product_sum")


ROUNDED = [("bfloat16", exact) for exact in (0, 20)] + [("float16", exact) for exact in (0, 20)]
ROUNDINGS = [(p, fmt, *r) for p in host_profiles() for fmt in ALL_FORMATS for r in ROUNDED]
# the format has no part in the rounding, so a GPU gets each rounding once
ROUNDINGS += [
    (p, fmt, *r)
    for p in gpu_profiles()
    for fmt, r in zip(("mxfp4", "bfloat16", "float32", "mxfp4"), ROUNDED, strict=True)
]
LOW_BITS = {"bfloat16": 0xFFFF, "float16": 0x1FFF}


@pytest.mark.parametrize(
    ("profile", "fmt", "act", "exact_rows"), ROUNDINGS, ids=lambda v: getattr(v, "name", str(v))
)
def test_all_but_the_exact_rows_are_rounded(
    profile: TargetProfile, fmt: WeightFormat, act: Activation, exact_rows: int
) -> None:
    """Router logits stay float32; each sum with an addend is rounded again (spec. 3.6b)."""
    op = replace(operator(fmt, 37, 64, addends=0 if exact_rows else 2), act=act)
    op = replace(op, exact_rows=exact_rows)
    weight = weight_of(op)
    for count in (1, 3, 4, 29, 40):
        given = inputs(op, count, weight, count)
        got, want = run(op, profile, given)["out"], expect(op, given)["out"]
        assert relative_error(got, want) <= tolerance("linear", act)
        assert not (got[:, exact_rows:].view(np.uint32) & LOW_BITS[act]).any()
        kept = magnitude(op, weight, given)[:, :exact_rows]
        error = share_of_magnitude(got[:, :exact_rows], want[:, :exact_rows], kept)
        assert error <= tolerance("product_sum")
        assert not exact_rows or (got[:, :exact_rows].view(np.uint32) & LOW_BITS[act]).any()


@PROFILES
@FORMATS
def test_f5_a_row_does_not_depend_on_its_company(profile: TargetProfile, fmt: WeightFormat) -> None:
    """Within one path a row's bits are the same alone or among others, wherever it stands."""
    op = operator(fmt, 35, 96, 2)
    weight = weight_of(op)
    given = inputs(op, 80, weight)
    whole = run(op, profile, given)["out"]
    for count in (FEW[profile.family] + 1, 17, 32, 33):
        part = run(op, profile, given | {"x": given["x"][5 : 5 + count]})["out"]
        np.testing.assert_array_equal(part, whole[5 : 5 + count])
    alike = FEW_ALIKE.get(profile.kind, {}).get(fmt, FEW[profile.family])
    if alike < FEW[profile.family]:
        few = run(op, profile, given | {"x": given["x"][: FEW[profile.family]]})["out"]
        part = run(op, profile, given | {"x": given["x"][3 : 3 + alike + 1]})["out"]
        np.testing.assert_array_equal(part, few[3 : 3 + alike + 1])
    few = run(op, profile, given | {"x": given["x"][:alike]})["out"]
    for i in range(alike):
        one = run(op, profile, given | {"x": given["x"][i : i + 1]})["out"]
        np.testing.assert_array_equal(one[0], few[i])


@FORMATS
@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
def test_f5_large_and_small_tiles_give_the_same_bits(
    profile: TargetProfile, fmt: WeightFormat
) -> None:
    """A matrix of many rows, for which the large tiles begin at 64 rows of x."""
    op = operator(fmt, 16400, 32 if fmt == "mxfp4" else 33)
    weight = weight_of(op)
    given = inputs(op, 70, weight)
    assert error(op, profile, weight, given) <= tolerance("product_sum")
    large = run(op, profile, given)["out"]
    small = run(op, profile, given | {"x": given["x"][20:60]})["out"]
    np.testing.assert_array_equal(small, large[20:60])


@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
def test_f4_grids_beyond_65535_workgroups_per_dimension(profile: TargetProfile) -> None:
    """Many rows of x, and so many weight rows that the list of workgroups is folded."""
    for op, count in ((operator("float32", 5, 4), 70000), (operator("float32", 600000, 1), 1)):
        weight = weight_of(op)
        assert error(op, profile, weight, inputs(op, count, weight)) <= tolerance("product_sum")


def test_f25_a_device_with_little_shared_memory_and_few_threads() -> None:
    """The least that Vulkan promises; and what a device cannot do at all is said, not tried."""
    small = replace(vulkan_profile("lavapipe"), name="small", threads=128, shared_bytes=16384)
    op = operator("bfloat16", 35, 96, 2)
    weight = weight_of(op)
    for count in (1, 5, 600):
        assert error(op, small, weight, inputs(op, count, weight)) <= tolerance("product_sum")
    for device, reason in (
        (replace(small, threads=64), "do not fit"),
        (replace(small, features=small.features - {"storage8"}), "8-bit"),
    ):
        with pytest.raises(TargetError, match=reason):
            registry.select(operator("mxfp4", 35, 96, 2), device)


@PROFILES
@FORMATS
@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_f11_a_bad_number_stays_bad_and_in_its_row(
    profile: TargetProfile, fmt: WeightFormat, count: int, bad: float
) -> None:
    op = operator(fmt, 35, 96, 2)
    weight = weight_of(op)
    given = inputs(op, count, weight)
    clean = run(op, profile, given)["out"]
    given["x"][1, 40] = bad
    got = run(op, profile, given)["out"]
    touched = weight.values[0, :, 40 - op.x_offset] != 0
    assert not np.isfinite(got[1, : op.rows][touched]).any()
    np.testing.assert_array_equal(got[1, op.rows :], clean[1, op.rows :])
    np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))


@PROFILES
@FORMATS
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e12, 1e30])
def test_any_size_of_x_keeps_the_relative_error(
    profile: TargetProfile, fmt: WeightFormat, size: float
) -> None:
    op = operator(fmt, 35, 96, 2)
    weight = weight_of(op)
    for count in (1, 9):
        given = inputs(op, count, weight)
        given["x"] = (given["x"] * np.float32(size)).astype(np.float32)
        assert error(op, profile, weight, given) <= tolerance("product_sum")


@PROFILES
@FORMATS
def test_columns_outside_of_the_slice_are_not_read(
    profile: TargetProfile, fmt: WeightFormat
) -> None:
    op = operator(fmt, 35, 96, 2)
    weight = weight_of(op)
    for count in (1, 9):
        given = inputs(op, count, weight)
        clean = run(op, profile, given)["out"]
        given["x"][:, :3] = given["x"][:, 99:101] = given["x"][:, 197:] = np.nan
        np.testing.assert_array_equal(run(op, profile, given)["out"], clean)
