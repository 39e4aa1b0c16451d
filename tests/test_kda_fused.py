"""The KDA step with all that lies between the projections, against its four parts in float64."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import Activation, KdaStepFused
from k3tvm.schedules.profile import TargetProfile
from k3tvm.schedules.registry import select
from tests.kernels import expect, gpu_profiles, profiles, relative_error, run
from tests.test_kda import MIXED, SLOTS, Inputs, Seqs
from tests.tolerances import tolerance

each_profile = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)


def fused(
    heads: int, dim: int, act: Activation = "float32", bound: float | None = -5.0, kernel: int = 4
) -> KdaStepFused:
    """An operator whose inputs are slices of wider rows."""
    width = heads * dim
    return KdaStepFused(
        heads, dim, kernel, bound, 1e-5, 3 * width + 9, heads + 5, 2, width + 7, 3, act
    )


def inputs_of(op: KdaStepFused, seqs: Seqs, seed: int = 1) -> Inputs:
    """Random inputs of order one."""
    rng = np.random.default_rng(seed)
    n, width = max(first + rows for _, first, rows, _ in seqs), op.heads * op.dim

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return {
        "x": normal(n, op.x_width),
        "taps": normal(op.kernel, 3 * width) / 2,
        "raw": 2 * normal(n, width),
        "write": normal(n, op.b_width),
        "dt_bias": normal(width),
        "a": np.exp(rng.uniform(-0.5, 1, op.heads)).astype(np.float32),
        "gate": normal(n, op.z_width),
        "weight": normal(op.dim),
        "seqs": np.array(seqs, np.int32),
        "tail": normal(SLOTS, op.kernel - 1, 3 * width),
        "state": normal(SLOTS, op.heads, op.dim, op.dim),
    }


@each_profile
@pytest.mark.parametrize(
    ("heads", "dim", "act", "bound", "kernel"),
    [
        (1, 5, "float32", -5.0, 4),
        (3, 7, "float32", None, 2),
        (2, 37, "float32", -5.0, 4),
        (2, 24, "bfloat16", -5.0, 4),
        (2, 24, "float16", None, 3),
        (2, 128, "float32", -5.0, 4),
        (1, 132, "float32", -5.0, 4),
    ],
)
def test_f2_f3_f5_it_is_its_parts(
    profile: TargetProfile,
    heads: int,
    dim: int,
    act: Activation,
    bound: float | None,
    kernel: int,
) -> None:
    """Tails and states of the slots of the call, in any order, are brought up to date."""
    op = fused(heads, dim, act, bound, kernel)
    inputs = inputs_of(op, MIXED)
    got, want = run(op, profile, inputs), expect(op, inputs)
    assert relative_error(got["out"], want["out"]) <= tolerance("kda", act)
    for slot, *_ in MIXED:
        assert relative_error(got["state"][slot], want["state"][slot]) <= tolerance("kda", act)
    np.testing.assert_array_equal(got["tail"], want["tail"].astype(np.float32))
    np.testing.assert_array_equal(got["state"][2], inputs["state"][2])


@each_profile
def test_f4_f5_each_sequence_has_the_bits_of_its_solo_steps(profile: TargetProfile) -> None:
    """Token by token and alone: the same bits as all sequences together."""
    op = fused(2, 24)
    inputs = inputs_of(op, [(4, 0, 1, 9), (1, 1, 5, 0), (3, 6, 3, 7)])
    together = run(op, profile, inputs)
    memory = {name: inputs[name] for name in ("tail", "state")}
    for slot, first, rows, _ in inputs["seqs"]:
        for t in range(first, first + rows):
            names = ("x", "raw", "write", "gate")
            token = {name: inputs[name][t : t + 1] for name in names}
            seqs = {"seqs": np.array([[slot, 0, 1, t]], np.int32)}
            got = run(op, profile, inputs | token | memory | seqs)
            np.testing.assert_array_equal(got["out"][0], together["out"][t])
            memory = {name: got[name] for name in memory}
    for name, array in memory.items():
        np.testing.assert_array_equal(array, together[name])


@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
def test_a_head_that_fits_is_one_kernel(profile: TargetProfile) -> None:
    """128 x 128 is one kernel; a head that needs several workgroups is four."""
    assert select(fused(96, 128), profile).schedule == "kda_fused.kda_fused_gpu"
    assert select(fused(1, 132), profile).schedule == "kda_fused.kda_parts_gpu"
