"""Products of few rows on CUDA's tensor cores, emulated, against float64: the cases of their own.

What all targets have in common is in test_linear.py and test_experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from k3tvm import emulate
from k3tvm.compiler.targets.cuda import cuda_emulated_profile
from k3tvm.relax_models.operators import Activation, ExpertLinear, Linear, WeightFormat
from tests import test_experts as experts
from tests import test_linear as linear
from tests.kernels import expect, run
from tests.tolerances import tolerance
from tests.weights import Weight, mxfp4_weight, pack_codes, share_of_magnitude

ROWS = 16 * 3 - 5  # an odd number of blocks of 16: the last strip has less than all it could
CUDA = cuda_emulated_profile()
# A batch that is not full; two warps of which one has a batch more, or a step, or half a step
SHAPES = [("mxfp4", 96), ("mxfp4", 1152), ("bfloat16", 31), ("bfloat16", 260)]


@pytest.fixture
def orders() -> Iterator[range]:
    """Seeds of three orders of threads; afterwards the first one again."""
    yield range(3)
    emulate.set_seed(0)


def check(op: Linear, weight: Weight, given: dict[str, np.ndarray], act: Activation) -> None:
    got, want = run(op, CUDA, given)["out"], expect(op, given)["out"]
    error = share_of_magnitude(got, want, linear.magnitude(op, weight, given))
    assert error <= tolerance("product_sum" if act == "float32" else act), len(given["x"])


@pytest.mark.parametrize(("fmt", "k"), SHAPES)
def test_widths_and_blocks_that_warps_do_not_share_evenly(fmt: WeightFormat, k: int) -> None:
    op = linear.operator(fmt, ROWS, k, 1, 1)
    weight = linear.weight_of(op)
    for count in (1, 2, 3, 5, 9, 16):
        check(op, weight, linear.inputs(op, count, weight, count), "float32")


@pytest.mark.parametrize(
    ("fmt", "act"), [("mxfp4", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float16")]
)
def test_16_bit_activations(fmt: WeightFormat, act: Activation) -> None:
    """x as such activations are, which one part or two hold."""
    op = replace(linear.operator(fmt, 70, 96, 2), act=act)
    weight = linear.weight_of(op)
    low = np.uint32(linear.LOW_BITS[act])
    for count in (1, 2, 7, 16):
        given = linear.inputs(op, count, weight, count)
        given["x"] = (given["x"].view(np.uint32) & ~low).view(np.float32)
        check(op, weight, given, act)


def test_outliers_of_x_do_not_cost_the_others_their_digits() -> None:
    """In each group one value is 2^9 times the others, and meets a weight of zero."""
    k, rng = 96, np.random.default_rng(3)
    large = np.arange(0, k, 32) + rng.integers(0, 32, k // 32)
    codes = rng.integers(0, 16, (ROWS, k)).astype(np.uint8)
    codes[:, large] = 0
    weight = mxfp4_weight(pack_codes(codes), rng.integers(118, 125, (ROWS, k // 32), np.uint8))
    op = linear.operator("mxfp4", ROWS, k, 1, 1)
    for count in (2, 6):
        given = linear.inputs(op, count, weight)
        given["x"][:, op.x_offset + large] *= 2.0**9
        check(op, weight, given, "float32")


@pytest.mark.parametrize("count", [1, 3])
def test_f14_every_code_times_every_scale_is_exact(count: int) -> None:
    """One-hot rows of x, bytes 0 to 254: the result is the weight, bit for bit."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (255, 2))
    scales = np.arange(255, dtype=np.uint8)[:, None]
    weight = mxfp4_weight(pack_codes(codes), scales)
    op = Linear(255, 32, "mxfp4", "float32", 32)
    with np.errstate(over="ignore"):
        want = weight.values.astype(np.float32)
    for k in range(0, 16, count):
        at = np.arange(k, k + count)
        x = np.eye(32, dtype=np.float32)[at]
        got = run(op, CUDA, {"x": x} | weight.arrays)["out"]
        np.testing.assert_array_equal(got, want[:, at].T)


@pytest.mark.parametrize(("fmt", "k"), SHAPES[1::2])
def test_f5_three_orders_of_threads_give_the_same_bits(
    fmt: WeightFormat, k: int, orders: range
) -> None:
    op = linear.operator(fmt, ROWS, k, 1, 1)
    weight = linear.weight_of(op)
    for count in (1, 9):
        given, results = linear.inputs(op, count, weight), []
        for seed in orders:
            emulate.set_seed(seed)
            results.append(run(op, CUDA, given)["out"])
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


def test_f11_infinity_beside_zero_codes_and_the_largest_numbers() -> None:
    """A group that is not finite is NaN in its row alone; large numbers are like others."""
    op = linear.operator("mxfp4", ROWS, 96, 1, 1)
    weight = linear.weight_of(op)
    given = linear.inputs(op, 5, weight)
    x = given["x"]
    x[1, 3], x[2, 40], x[3] = np.inf, np.nan, x[3] * np.float32(2.0**110)
    got = run(op, CUDA, given)["out"]
    assert np.isnan(got[1]).all() and np.isnan(got[2]).all()
    kept = given | {name: given[name][[0, 3, 4]] for name in ("x", "addend0")}
    want, size = expect(op, kept)["out"], linear.magnitude(op, weight, kept)
    assert share_of_magnitude(got[[0, 3, 4]], want, size) <= tolerance("product_sum")


@pytest.mark.parametrize(("fmt", "per_choice"), [("mxfp4", True), ("bfloat16", False)])
def test_experts_with_no_one_and_many_pairs(fmt: WeightFormat, per_choice: bool) -> None:
    """Chunks that are full, begun, and of one pair, in the paths for few pairs and for more."""
    op = experts.operator(fmt, 9, 2, 70, 96, per_choice)
    weight, rng = experts.weight_of(op), np.random.default_rng(2)
    for pairs in (
        [0, 1, 0, 1, 0, 0, 0, 0, 0],
        [0, 1, 2, 3, 8, 9, 17, 0, 0],
        [33, 5, 0, 0] + 5 * [0],
    ):
        chosen = rng.permutation(np.repeat(np.arange(9), pairs).astype(np.int32))
        experts.check(op, CUDA, weight, chosen.reshape(-1, 2))


def test_many_experts_of_which_few_are_chosen() -> None:
    """The path of a decoded token, also where two tokens share an expert."""
    op = ExpertLinear(40, 3, 37, 64, "mxfp4", False, 64, 0, "float32")
    weight, rng = experts.weight_of(op), np.random.default_rng(5)
    for count in (1, 2, 6):
        chosen = experts.choices(rng, op, count)
        chosen[:, 0] = 7
        chosen[:, 1:][chosen[:, 1:] == 7] = 8
        experts.check(op, CUDA, weight, chosen)
