"""MLA kernels: cache rows, causal attention over the cache, output gate (F3, F4, F5, F6, F11)."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.compiler.targets.vulkan import vulkan_profile
from k3tvm.relax_models.operators import MlaAttention, MlaCache, SigmoidGate
from k3tvm.schedules.numerics import round_to
from tests.kernels import device_functions, expect, gpu_profiles, profiles, relative_error, run
from tests.tolerances import tolerance

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
GPUS = pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
ACTS = pytest.mark.parametrize("act", ["float32", "bfloat16", "float16"])
SEQS = {
    "one token": [[0, 0, 1, 0]],
    "mixed": [[3, 0, 1, 4], [0, 1, 5, 0], [2, 6, 1, 60]],
    "prompt": [[1, 0, 70, 0]],
}
ODD = (12, 82, 9)  # heads, rank, rope: not multiples of 16; shared, since a kernel takes seconds


def attention_op(heads: int, rank: int, rope: int, act: str) -> MlaAttention:
    """All widths differ, the queries do not start at column 0."""
    stride = 5 + rope + 2
    return MlaAttention(heads, rank, rope, 5, 0.31, heads * stride + 3, 3, stride, act)


def attention_inputs(op: MlaAttention, seqs: list[list[int]], seed: int) -> dict[str, np.ndarray]:
    """Random queries and a cache in the activation's format; places that nobody sees hold NaN."""
    rng = np.random.default_rng(seed)
    rows = sum(s[2] for s in seqs)
    used = {s[0]: s[3] + s[2] for s in seqs}
    cache = np.full((4, max(used.values()) + 2, op.rank + op.rope), np.nan, np.float32)
    for slot, length in used.items():
        rows_of = rng.standard_normal((length, op.rank + op.rope))
        cache[slot, :length] = round_to(op.act, rows_of)
    return {
        "absorbed": rng.standard_normal((rows, op.heads * op.rank), np.float32),
        "q": rng.standard_normal((rows, op.q_width), np.float32),
        "cache": cache,
        "seqs": np.array(seqs, np.int32),
    }


@PROFILES
@pytest.mark.parametrize("seqs", SEQS.values(), ids=SEQS)
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "act"),
    [(1, 16, 4, "float32"), (*ODD, "float32"), (*ODD, "bfloat16")],
)
def test_f5_attention_sees_its_own_sequence_up_to_its_own_position(
    profile, heads, rank, rope, act, seqs
):
    op = attention_op(heads, rank, rope, act)
    inputs = attention_inputs(op, seqs, heads)
    got, want = run(op, profile, inputs)["out"], expect(op, inputs)["out"]
    assert relative_error(got, want) <= tolerance("mla_attention", act)


@PROFILES
@ACTS
def test_f6_later_tokens_never_change_earlier_rows(profile, act):
    op = attention_op(*ODD, act)
    inputs = attention_inputs(op, [[2, 0, 60, 7]], 1)
    before = run(op, profile, inputs)["out"]
    for changed in (0, 1, 30, 59):
        cache = inputs["cache"].copy()
        cache[2, 7 + changed :] = np.nan
        after = run(op, profile, inputs | {"cache": cache})["out"]
        np.testing.assert_array_equal(after[:changed], before[:changed])
        assert np.isnan(after[changed:]).all()


@PROFILES
@ACTS
def test_f4_a_row_is_bit_equal_alone_and_in_company(profile, act):
    """Alone its keys are split over the threads, in company its sequence is one of many tasks."""
    op = attention_op(*ODD, act)
    position = 1000
    inputs = attention_inputs(op, [[1, 0, 23, position]], 5)
    together = run(op, profile, inputs)["out"]
    for row in (0, 4, 22):
        alone = {k: inputs[k][row : row + 1] for k in ("absorbed", "q")}
        alone["seqs"] = np.array([[1, 0, 1, position + row]], np.int32)
        np.testing.assert_array_equal(run(op, profile, inputs | alone)["out"][0], together[row])


@GPUS
@ACTS
@pytest.mark.parametrize(
    "seqs", [[[2, 0, 1, 300], [0, 1, 3, 9]], [[3, 0, 1, 70], [1, 1, 260, 0]]], ids=["few", "many"]
)
def test_f5_tiles_of_32_pairs_and_loads_of_four_columns(profile, act, seqs):
    """Few rows: keys are split over workgroups. Many: a workgroup per tile of 33 heads' pairs."""
    op = MlaAttention(33, 260, 12, 4, 0.31, 33 * 16 + 8, 8, 16, act)
    inputs = attention_inputs(op, seqs, 2)
    got, want = run(op, profile, inputs)["out"], expect(op, inputs)["out"]
    assert relative_error(got, want) <= tolerance("mla_attention", act)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
def test_no_launch_writes_what_its_other_workgroups_read(act):
    """How many parts have keys is written by the launch before the one whose workgroups read it."""
    kernels = device_functions(attention_op(3, 20, 5, act), vulkan_profile("lavapipe"))
    # whole tiles: out; parts: softmaxes and their number, then sums; then out
    assert sorted(k.kinds.count("P") for k in kernels) == [1, 1, 1, 2]


@GPUS
@ACTS
def test_f6_many_rows_at_once_see_no_later_token(profile, act):
    op = attention_op(*ODD, act)
    inputs = attention_inputs(op, [[2, 0, 180, 7]], 1)
    before = run(op, profile, inputs)["out"]
    assert relative_error(before, expect(op, inputs)["out"]) <= tolerance("mla_attention", act)
    for changed in (0, 100, 179):
        cache = inputs["cache"].copy()
        cache[2, 7 + changed :] = np.nan
        after = run(op, profile, inputs | {"cache": cache})["out"]
        np.testing.assert_array_equal(after[:changed], before[:changed])
        assert np.isnan(after[changed:]).all()


@PROFILES
@ACTS
def test_attention_with_scores_far_apart(profile, act):
    op = attention_op(*ODD, act)
    inputs = attention_inputs(op, [[0, 0, 1, 1100]], 3)
    inputs["cache"][0, :1101, 0] = np.linspace(-300, 300, 1101)
    inputs["absorbed"].reshape(op.heads, op.rank)[:, 0] = np.linspace(-5, 5, op.heads)
    got, want = run(op, profile, inputs)["out"], expect(op, inputs)["out"]
    assert relative_error(got, want) <= tolerance("mla_attention", act)


@PROFILES
@ACTS
@pytest.mark.parametrize(
    ("q_rank", "rank", "rope"), [(0, 33, 5), (50, 16, 32), (1, 1, 0), (7, 4, 1)]
)
def test_f5_cache_rows_go_to_their_slot_and_position(profile, act, q_rank, rank, rope):
    rng = np.random.default_rng(rank)
    x_width = 7 + q_rank + rank + rope
    inputs = {
        "x": rng.standard_normal((7, x_width), np.float32),
        "q_norm": rng.standard_normal(max(q_rank, 1), np.float32),
        "kv_norm": rng.standard_normal(rank, np.float32),
        "seqs": np.array([[3, 0, 1, 4], [0, 1, 5, 0], [2, 6, 1, 6]], np.int32),
        "cache": rng.standard_normal((4, 7, rank + rope), np.float32),
    }
    op = MlaCache(q_rank, rank, rope, 1e-6, x_width, rank + rope + 5, 2, act)
    got, want = run(op, profile, inputs), expect(op, inputs)
    assert relative_error(got["cache"], want["cache"]) <= tolerance("rms_norm", act)
    touched = (want["cache"] != inputs["cache"]).any(-1)
    assert touched.sum() == 7
    np.testing.assert_array_equal(got["cache"][~touched], inputs["cache"][~touched])
    if q_rank:
        assert relative_error(got["query"], want["query"]) <= tolerance("rms_norm", act)


@PROFILES
@ACTS
@pytest.mark.parametrize(
    ("rows", "width", "more"), [(1, 1, 9), (3, 37, 9), (2, 540, 9), (2, 36, 8)]
)
def test_sigmoid_gate(profile, act, rows, width, more):
    rng = np.random.default_rng(width)
    inputs = {
        "o": rng.standard_normal((rows, width), np.float32),
        "gate": 5 * rng.standard_normal((rows, width + more), np.float32),
    }
    op = SigmoidGate(width, width + more, 4, act)
    got, want = run(op, profile, inputs)["out"], expect(op, inputs)["out"]
    assert relative_error(got, want) <= tolerance("sigmoid_gate", act)
