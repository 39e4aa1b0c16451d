"""The ExpertLinear kernel against float64: experts with 0, 1, 3, 4 and many rows, odd counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tvm.relax_models.operators import Activation, ExpertLinear, WeightFormat
from k3tvm.schedules.profile import TargetProfile
from tests.kernels import expect, gpu_profiles, host_profiles, profiles, relative_error, run
from tests.tolerances import tolerance
from tests.weights import Weight, random_weight, share_of_magnitude

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
ALL_FORMATS = ("float32", "bfloat16", "mxfp4")
FORMATS = pytest.mark.parametrize("fmt", ALL_FORMATS)
# experts, top_k, rows, k, per_choice: expert counts that are no power of two, 1 among them
SHAPES = [(4, 2, 64, 64, True), (7, 3, 37, 96, False), (1, 1, 5, 32, True)]
ODD_K = [(5, 3, 19, 37, True)]  # not for MXFP4
CASES = [(fmt, s) for fmt in ALL_FORMATS for s in SHAPES + (ODD_K if fmt != "mxfp4" else [])]
# Fewer on a GPU, where compiling takes longest; the last one has more experts than pairs.
GPU_CASES = [("mxfp4", SHAPES[1]), ("mxfp4", SHAPES[2]), ("bfloat16", ODD_K[0])]
GPU_CASES += [("float32", ODD_K[0]), ("bfloat16", (40, 2, 19, 33, False))]
ALL_CASES = [(p, *case) for p in host_profiles() for case in CASES]
ALL_CASES += [(p, *case) for p in gpu_profiles() for case in GPU_CASES]
LARGE = [0, 1, 3, 0, 4, 70, 33, 32, 1]  # pairs of each expert; full tiles of 32 and one more
SHARED = (9, 2, 35, 64, False)  # of the tests where the shape is not the point


def operator(
    fmt: WeightFormat, experts: int, top_k: int, rows: int, k: int, per_choice: bool
) -> ExpertLinear:
    """x starts at column 5 of a wider row; F16: k, rows and the width of x all differ."""
    width = 5 + (top_k if per_choice else 1) * k + 2
    return ExpertLinear(experts, top_k, rows, k, fmt, per_choice, width, 5, "float32")


def routed(chosen: np.ndarray, experts: int) -> dict[str, np.ndarray]:
    """What ExpertSort makes of the choices: a stable order by expert."""
    flat = chosen.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32).reshape(chosen.shape)
    first = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))])
    return {"chosen": chosen, "first": first.astype(np.int32), "order": order}


def choices(rng: np.random.Generator, op: ExpertLinear, count: int) -> np.ndarray:
    """Distinct experts for every row."""
    rows = [rng.permutation(op.experts)[: op.top_k] for _ in range(count)]
    return np.array(rows, np.int32).reshape(count, op.top_k)


def inputs(op: ExpertLinear, weight: Weight, chosen: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(chosen))
    x = rng.standard_normal((len(chosen), op.x_width)).astype(np.float32)
    return {"x": x} | weight.arrays | routed(chosen, op.experts)


def weight_of(op: ExpertLinear) -> Weight:
    return random_weight(np.random.default_rng(0), op.fmt, (op.experts,), op.rows, op.k)


def magnitude(op: ExpertLinear, weight: Weight, given: dict[str, np.ndarray]) -> np.ndarray:
    absolute = Weight(weight.arrays, np.abs(weight.values))
    rows = np.zeros((len(given["x"]), op.top_k, op.rows))
    for (t, c), e in np.ndenumerate(given["chosen"]):
        at = op.x_offset + (c * op.k if op.per_choice else 0)
        rows[t, c] = absolute.values[e] @ np.abs(given["x"][t, at : at + op.k])
    return rows.reshape(len(rows), -1)


def check(op: ExpertLinear, profile: TargetProfile, weight: Weight, chosen: np.ndarray) -> None:
    given = inputs(op, weight, chosen)
    got, want = run(op, profile, given)["out"], expect(op, given)["out"]
    error = share_of_magnitude(got, want, magnitude(op, weight, given))
    assert error <= tolerance("product_sum"), chosen.shape


@pytest.mark.parametrize(
    ("profile", "fmt", "shape"), ALL_CASES, ids=lambda v: getattr(v, "name", str(v))
)
def test_every_pair_gets_its_expert(
    profile: TargetProfile, fmt: WeightFormat, shape: tuple[int, int, int, int, bool]
) -> None:
    """One token to seventy: each target goes from its path for few rows to that for many."""
    op, rng = operator(fmt, *shape), np.random.default_rng(1)
    weight = weight_of(op)
    for count in (1, 2, 3, 4, 5, 9, 13, 17, 40, 70):
        check(op, profile, weight, choices(rng, op, count))


@PROFILES
@FORMATS
def test_experts_with_0_1_3_4_and_many_rows_in_one_call(
    profile: TargetProfile, fmt: WeightFormat
) -> None:
    """The borders of the paths, an expert without rows first, in the middle and last."""
    op = operator(fmt, *SHARED)
    weight = weight_of(op)
    for counts in ([0, 1, 3, 0, 4, 5, 23, 2, 0], [0, 0, 0, 0, 0, 0, 0, 0, 4], [1, 3, 0] * 3, LARGE):
        chosen = np.repeat(np.arange(9), counts).astype(np.int32)
        check(op, profile, weight, np.random.default_rng(2).permutation(chosen).reshape(-1, 2))


@PROFILES
@FORMATS
def test_f5_a_row_does_not_depend_on_its_company(profile: TargetProfile, fmt: WeightFormat) -> None:
    """The same tokens twice in one call: equal bits, whatever else their experts serve."""
    op, rng = operator(fmt, *SHARED), np.random.default_rng(3)
    weight, chosen = weight_of(op), choices(rng, op, 30)
    given = inputs(op, weight, np.concatenate([chosen, chosen[::-1]]))
    given["x"][30:] = given["x"][:30][::-1]
    got = run(op, profile, given)["out"]
    np.testing.assert_array_equal(got[30:], got[:30][::-1])


ACTS = ("bfloat16", "float16")
ROUNDINGS = [(p, fmt, act) for p in host_profiles() for fmt in ALL_FORMATS for act in ACTS]
ROUNDINGS += [(p, "mxfp4", act) for p in gpu_profiles() for act in ACTS]
LOW_BITS = {"bfloat16": 0xFFFF, "float16": 0x1FFF}


@pytest.mark.parametrize(
    ("profile", "fmt", "act"), ROUNDINGS, ids=lambda v: getattr(v, "name", str(v))
)
def test_results_are_rounded(profile: TargetProfile, fmt: WeightFormat, act: Activation) -> None:
    op = replace(operator(fmt, 5, 2, 37, 64, True), act=act)
    weight, rng = weight_of(op), np.random.default_rng(4)
    for count in (1, 5, 30):
        given = inputs(op, weight, choices(rng, op, count))
        got, want = run(op, profile, given)["out"], expect(op, given)["out"]
        assert relative_error(got, want) <= tolerance("experts", act)
        assert not (got.view(np.uint32) & LOW_BITS[act]).any()


@PROFILES
@FORMATS
@pytest.mark.parametrize("count", [2, 33])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_f11_a_bad_number_stays_bad_and_in_its_row(
    profile: TargetProfile, fmt: WeightFormat, count: int, bad: float
) -> None:
    op = operator(fmt, 3, 2, 20, 64, False)
    weight, rng = weight_of(op), np.random.default_rng(5)
    given = inputs(op, weight, choices(rng, op, count))
    clean = run(op, profile, given)["out"]
    given["x"][1, op.x_offset + 40] = bad
    got = run(op, profile, given)["out"]
    touched = weight.values[given["chosen"][1], :, 40].reshape(-1) != 0
    assert touched.any() and not np.isfinite(got[1, touched]).any()
    np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))


@PROFILES
@FORMATS
def test_f11_an_expert_that_nobody_chose_is_not_read(
    profile: TargetProfile, fmt: WeightFormat
) -> None:
    """NaN weights of an idle expert do not reach anyone."""
    op, rng = operator(fmt, *SHARED), np.random.default_rng(6)
    weight = weight_of(op)
    for count in (1, 30, 60):
        chosen = rng.choice([0, 1, 3, 5, 8], (count, 2)).astype(np.int32)
        given = inputs(op, weight, chosen)
        clean = run(op, profile, given)["out"]
        name = "weight_scale" if fmt == "mxfp4" else "weight"
        broken = given[name].copy()
        broken[[2, 4, 6, 7]] = np.nan if fmt == "float32" else 255 if fmt == "mxfp4" else 0xFFFFFFFF
        np.testing.assert_array_equal(run(op, profile, given | {name: broken})["out"], clean)
