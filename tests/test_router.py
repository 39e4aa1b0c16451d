"""Router and expert-sort kernels: bias, ties, groups, odd expert counts, NaN rows (F11, F15)."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import ExpertSort, Router
from tests.kernels import expect, profiles, relative_error, run
from tests.tolerances import tolerance

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)


def check(op: Router, profile, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Same experts in the same order, weights within the tolerance; returns the kernel's answer."""
    got, want = run(op, profile, inputs), expect(op, inputs)
    np.testing.assert_array_equal(got["experts"], want["experts"])
    assert relative_error(got["weights"], want["weights"]) <= tolerance("router")
    return got


def spread_logits(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Distinct logits, far enough apart that float32 and float64 sigmoids order them alike."""
    steps = np.linspace(-4, 4, width)
    return np.stack([rng.permutation(steps) for _ in range(rows)]).astype(np.float32)


@PROFILES
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "keep"),
    [(896, 16, 1, 1), (7, 3, 1, 1), (1, 1, 1, 1), (24, 4, 4, 2), (6, 2, 6, 3), (50, 9, 2, 1)],
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_f15_choice_follows_the_bias_and_weights_do_not(
    profile, experts, top_k, groups, keep, renormalize
):
    rng = np.random.default_rng(experts)
    inputs = {
        "x": spread_logits(rng, 5, experts + 3),
        "bias": rng.permutation(experts).astype(np.float32) / 3,
    }
    op = Router(experts, top_k, groups, keep, renormalize, 2.446, experts + 3)
    got = check(op, profile, inputs)
    unbiased = run(op, profile, inputs | {"bias": np.zeros(experts, np.float32)})
    if experts > top_k:
        assert (got["experts"] != unbiased["experts"]).any()


@PROFILES
def test_f15_three_hundred_tokens_over_896_experts(profile):
    rng = np.random.default_rng(7)
    inputs = {"x": spread_logits(rng, 300, 896), "bias": np.zeros(896, np.float32)}
    got = check(Router(896, 16, 1, 1, True, 1.0, 896), profile, inputs)
    assert relative_error(got["weights"].sum(1), np.ones(300)) <= tolerance("router")


@PROFILES
@pytest.mark.parametrize(("groups", "keep"), [(1, 1), (5, 2)])
def test_f15_the_lower_expert_and_group_win_ties(profile, groups, keep):
    x = np.zeros((3, 20), np.float32)
    x[1, [18, 5, 11]] = 1.0
    x[2] = -np.inf
    check(
        Router(20, 6, groups, keep, True, 1.0, 20),
        profile,
        {"x": x, "bias": np.full(20, -0.5, np.float32)},
    )


@PROFILES
@pytest.mark.parametrize(("groups", "keep"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("bad", [[0], [3, 20], range(21)])
def test_f11_a_row_with_nan_still_gives_distinct_valid_experts(profile, groups, keep, bad):
    x = spread_logits(np.random.default_rng(3), 2, 21)
    x[1, list(bad)] = np.nan
    op = Router(21, 14, groups, keep, False, 1.0, 21)
    inputs = {"x": x, "bias": np.linspace(-2, 2, 21, dtype=np.float32)}
    got, want = run(op, profile, inputs), expect(op, inputs)
    np.testing.assert_array_equal(got["experts"], want["experts"])
    assert all(len(set(row)) == 14 for row in got["experts"].tolist())
    assert got["experts"].min() >= 0 and got["experts"].max() < 21
    np.testing.assert_array_equal(np.isnan(got["weights"]), np.isnan(want["weights"]))


@PROFILES
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 1, 1), (300, 896, 16), (5, 7, 3)])
def test_expert_sort_is_stable_and_complete(profile, rows, experts, top_k):
    rng = np.random.default_rng(rows)
    chosen = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32)
    op = ExpertSort(experts, top_k)
    got, want = run(op, profile, {"chosen": chosen}), expect(op, {"chosen": chosen})
    np.testing.assert_array_equal(got["first"], want["first"])
    np.testing.assert_array_equal(got["order"], want["order"])
