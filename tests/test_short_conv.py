"""The short convolution against its reference; tails across chunks and sequences (F2, F4, F5)."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import Activation, ShortConv
from k3tvm.schedules.profile import TargetProfile
from tests.kernels import expect, gpu_profiles, profiles, relative_error, run
from tests.tolerances import tolerance

Seqs = list[tuple[int, int, int, int]]

SLOTS = 6

each_profile = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)


def inputs_of(op: ShortConv, seqs: Seqs, seed: int = 1) -> dict[str, np.ndarray]:
    """Random inputs; x and tail hold bfloat16 values, which both activation dtypes can have."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        bits = rng.standard_normal(shape, np.float32).view(np.uint32)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)

    rows = max(first + count for _, first, count, _ in seqs)
    return {
        "x": normal(rows, op.x_width),
        "weight": rng.standard_normal((op.kernel, op.channels), np.float32),
        "seqs": np.array(seqs, np.int32),
        "tail": normal(SLOTS, op.kernel - 1, op.channels),
    }


@each_profile
@pytest.mark.parametrize(
    ("channels", "kernel", "act"),
    [
        (1, 4, "float32"),
        (37, 4, "float32"),
        (37, 4, "float16"),
        (300, 3, "bfloat16"),
        (48, 2, "float32"),
    ],
)
def test_f4_f5_sequences_of_length_1_to_kernel_plus_1(
    profile: TargetProfile, act: Activation, channels: int, kernel: int
) -> None:
    """F4: short rows look into the tail; F5: slots in any order, each its own.

    Where few sequences have more than one row, a GPU has another kernel.
    """
    op = ShortConv(channels, kernel, channels + 5, act)
    long = [(4, 0, 1, 9), (0, 1, 2, 0), (5, 3, 3, 2), (1, 6, 4, 0), (3, 10, 9, 7)]
    short = [(4, 0, 1, 9), (0, 1, 1, 0), (5, 2, 1, 2), (1, 3, 2, 0)]
    for seqs in (long, short):
        inputs = inputs_of(op, seqs)
        got, want = run(op, profile, inputs), expect(op, inputs)
        assert relative_error(got["out"], want["out"]) <= tolerance("short_conv", act)
        np.testing.assert_array_equal(got["tail"], want["tail"].astype(np.float32))


@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
def test_f4_tail_longer_than_the_rows_of_a_thread(profile: TargetProfile) -> None:
    op = ShortConv(7, 12, 7, "float32")
    inputs = inputs_of(op, [(3, 0, 9, 7), (1, 9, 1, 0), (0, 10, 30, 0)])
    got, want = run(op, profile, inputs), expect(op, inputs)
    assert relative_error(got["out"], want["out"]) <= tolerance("short_conv")
    np.testing.assert_array_equal(got["tail"], want["tail"].astype(np.float32))


@each_profile
@pytest.mark.parametrize("parts", [[1] * 11, [2, 3, 6], [4, 7], [10, 1]])
def test_f2_rows_in_parts_give_the_same_bits_as_all_at_once(
    profile: TargetProfile, parts: list[int]
) -> None:
    op = ShortConv(50, 4, 50, "float32")
    inputs = inputs_of(op, [(2, 0, 11, 0)])
    whole = run(op, profile, inputs)
    tail, outs, at = inputs["tail"], [], 0
    for rows in parts:
        seqs = np.array([[2, 0, rows, at]], np.int32)
        part = run(
            op, profile, inputs | {"x": inputs["x"][at : at + rows], "seqs": seqs, "tail": tail}
        )
        tail, at = part["tail"], at + rows
        outs.append(part["out"])
    np.testing.assert_array_equal(np.concatenate(outs), whole["out"])
    np.testing.assert_array_equal(tail, whole["tail"])


@each_profile
def test_f6_later_rows_do_not_change_earlier_ones(profile: TargetProfile) -> None:
    op = ShortConv(40, 4, 40, "float32")
    inputs = inputs_of(op, [(0, 0, 12, 0)])
    changed = inputs["x"].copy()
    changed[7:] = np.nan
    got = run(op, profile, inputs | {"x": changed})
    np.testing.assert_array_equal(got["out"][:7], run(op, profile, inputs)["out"][:7])


def test_bfloat16_results_are_bfloat16() -> None:
    op = ShortConv(300, 3, 305, "bfloat16")
    inputs = inputs_of(op, [(0, 0, 5, 0)])
    for profile in profiles():
        assert not (run(op, profile, inputs)["out"].view(np.uint32) & 0xFFFF).any()
