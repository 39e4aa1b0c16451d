"""KDA kernels against the float64 recurrence: gates, step and chunk form, state hand-over."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from k3tvm.relax_models.operators import Activation, GatedRmsNorm, KdaChunk, KdaGate, KdaStep
from k3tvm.schedules.numerics import round_to
from k3tvm.schedules.profile import TargetProfile
from k3tvm.schedules.registry import reference_of
from tests.kernels import expect, profiles, relative_error, run
from tests.tolerances import tolerance

Seqs = list[tuple[int, int, int, int]]
Inputs = dict[str, np.ndarray]
Form = type[KdaStep] | type[KdaChunk]

SLOTS = 6
MIXED: Seqs = [(4, 0, 1, 9), (0, 1, 2, 0), (5, 3, 17, 2), (1, 20, 16, 0), (3, 36, 37, 7)]

each_profile = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
each_form = pytest.mark.parametrize("form", [KdaStep, KdaChunk], ids=lambda f: f.__name__)


def inputs_of(op: KdaStep | KdaChunk, seqs: Seqs, lowest: float = -5.0, seed: int = 1) -> Inputs:
    """Random inputs; log decays are uniform in (lowest, 0)."""
    rng = np.random.default_rng(seed)
    h, k, w = op.heads, op.key_dim, op.value_dim
    n = max(first + rows for _, first, rows, _ in seqs)
    return {
        "qkv": rng.standard_normal((n, h * (2 * k + w)), np.float32),
        "decay": np.exp(rng.uniform(lowest, 0, (n, h * k))).astype(np.float32),
        "beta": rng.uniform(0, 1, (n, h)).astype(np.float32),
        "seqs": np.array(seqs, np.int32),
        "state": rng.standard_normal((SLOTS, h, k, w), np.float32),
    }


def only(
    inputs: Inputs, start: int, stop: int, slot: int = 0, state: np.ndarray | None = None
) -> Inputs:
    """The rows start..stop of `inputs` as one sequence of `slot`."""
    rows = {name: inputs[name][start:stop] for name in ("qkv", "decay", "beta")}
    seqs = np.array([[slot, 0, stop - start, start]], np.int32)
    return rows | {"seqs": seqs, "state": inputs["state"] if state is None else state}


# --- gates --------------------------------------------------------------------------------------


@each_profile
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(1, 1, 1), (3, 5, 37), (4, 3, 128), (70_000, 1, 1)]
)
def test_f9_decay_and_beta_of_both_gates(
    profile: TargetProfile, bound: float | None, rows: int, heads: int, dim: int
) -> None:
    rng = np.random.default_rng(rows)
    op = KdaGate(heads, dim, bound, heads + 7, 4)
    inputs = {
        "raw": 4 * rng.standard_normal((rows, heads * dim), np.float32),
        "x": 3 * rng.standard_normal((rows, heads + 7), np.float32),
        "dt_bias": rng.standard_normal(heads * dim, np.float32),
        "a": np.exp(rng.uniform(-0.5, 1, heads)).astype(np.float32),
    }
    got, want = run(op, profile, inputs), expect(op, inputs)
    assert relative_error(got["decay"], want["decay"]) <= tolerance("kda_gate")
    assert relative_error(got["beta"], want["beta"]) <= tolerance("kda_gate")


@each_profile
@pytest.mark.parametrize(("bound", "least"), [(-5.0, np.exp(-5.0)), (None, 0.0)])
def test_f10_gates_at_extreme_inputs(
    profile: TargetProfile, bound: float | None, least: float
) -> None:
    """Saturated gates: decay 1 where closed, e^bound or 0 where open; never NaN."""
    raw = np.array([[-1e4, -200, 0, 200, 1e4, 3e38]], np.float32)
    op = KdaGate(1, 6, bound, 1, 0)
    inputs = {
        "raw": raw,
        "x": np.zeros((1, 1), np.float32),
        "dt_bias": np.zeros(6, np.float32),
        "a": np.array([1.5], np.float32),
    }
    decay = run(op, profile, inputs)["decay"][0]
    assert np.isfinite(decay).all() and (decay[:2] == 1).all()
    np.testing.assert_allclose(decay[3:], least, rtol=tolerance("kda_gate"))


@each_profile
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "act"),
    [
        (1, 1, 1, "float32"),
        (70_000, 1, 1, "float32"),
        (2, 9, 4, "bfloat16"),
        (3, 5, 37, "float32"),
        (3, 5, 37, "float16"),
        (2, 3, 128, "float32"),
    ],
)
def test_gated_norm(
    profile: TargetProfile, act: Activation, rows: int, heads: int, dim: int
) -> None:
    rng = np.random.default_rng(rows)
    width = heads * dim
    op = GatedRmsNorm(heads, dim, 1e-5, width + 9, 6, act)
    inputs = {
        "o": 3 * rng.standard_normal((rows, width), np.float32),
        "gate": 2 * rng.standard_normal((rows, width + 9), np.float32),
        "weight": rng.standard_normal(dim, np.float32),
    }
    error = relative_error(run(op, profile, inputs)["out"], expect(op, inputs)["out"])
    assert error <= tolerance("gated_rms_norm", act)


# --- the recurrence -----------------------------------------------------------------------------


@each_profile
@each_form
@pytest.mark.parametrize(("heads", "k", "w"), [(1, 1, 1), (3, 5, 7), (3, 37, 53), (1, 132, 130)])
def test_f3_f5_many_sequences_and_widths(
    profile: TargetProfile, form: Form, heads: int, k: int, w: int
) -> None:
    """F3: key width differs from value width; F5: slots in any order, others untouched."""
    op = form(heads, k, w, "float32")
    inputs = inputs_of(op, MIXED)
    got, want = run(op, profile, inputs), expect(op, inputs)
    assert relative_error(got["out"], want["out"]) <= tolerance("kda")
    for slot, *_ in MIXED:
        assert relative_error(got["state"][slot], want["state"][slot]) <= tolerance("kda")
    np.testing.assert_array_equal(got["state"][2], inputs["state"][2])


@each_profile
@each_form
def test_f5_each_sequence_has_the_bits_of_its_solo_run(profile: TargetProfile, form: Form) -> None:
    op = form(2, 24, 40, "float32")
    inputs = inputs_of(op, MIXED)
    together = run(op, profile, inputs)
    for slot, first, rows, _ in MIXED:
        alone = run(op, profile, only(inputs, first, first + rows, slot))
        np.testing.assert_array_equal(alone["out"], together["out"][first : first + rows])
        np.testing.assert_array_equal(alone["state"][slot], together["state"][slot])


@each_profile
@each_form
@pytest.mark.parametrize("size", [1, 7, 16, 32, 49])
def test_f2_f4_parts_hand_the_state_over(profile: TargetProfile, form: Form, size: int) -> None:
    """Same function in parts; the same bits when the parts are whole chunks of 16 rows."""
    op = form(2, 24, 40, "float32")
    inputs = inputs_of(op, [(0, 0, 50, 0)])
    whole = run(op, profile, inputs)
    state, outs = inputs["state"], []
    for start in range(0, 50, size):
        part = run(op, profile, only(inputs, start, min(start + size, 50), 0, state))
        state = part["state"]
        outs.append(part["out"])
    out = np.concatenate(outs)
    if size % 16 == 0 or form is KdaStep:
        np.testing.assert_array_equal(out, whole["out"])
        np.testing.assert_array_equal(state, whole["state"])
    assert relative_error(out, whole["out"]) <= tolerance("kda")
    assert relative_error(state[0], whole["state"][0]) <= tolerance("kda")


@each_profile
@each_form
@pytest.mark.parametrize("position", [1, 5, 16, 21])
def test_f6_rows_before_a_change_keep_their_bits(
    profile: TargetProfile, form: Form, position: int
) -> None:
    """NaN from a position on, and then no rows at all from there on: the same bits before it."""
    op = form(2, 24, 40, "float32")
    inputs = inputs_of(op, [(0, 0, 40, 0)])
    want = run(op, profile, inputs)["out"][:position]
    changed = {name: inputs[name].copy() for name in ("qkv", "decay", "beta")}
    for array in changed.values():
        array[position:] = np.nan
    got = run(op, profile, inputs | changed)["out"][:position]
    np.testing.assert_array_equal(got, want)
    cut = run(op, profile, only(inputs, 0, position))["out"]
    np.testing.assert_array_equal(cut, want)


@each_profile
@each_form
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 4, 11, 18])
def test_f6_a_bad_value_stays_in_its_column(
    profile: TargetProfile, form: Form, position: int, bad: float
) -> None:
    """Later outputs of that column are not finite; all others, the state too, keep their bits."""
    op = form(1, 24, 40, "float32")
    inputs = inputs_of(op, [(0, 0, 30, 0)])
    want = run(op, profile, inputs)
    column = 2 * position
    qkv = inputs["qkv"].copy()
    qkv[position, 2 * op.key_dim + column] = bad
    got = run(op, profile, inputs | {"qkv": qkv})
    assert not np.isfinite(got["out"][position:, column]).any()
    assert not np.isfinite(got["state"][0, :, :, column]).any()
    for result in (got, want):
        result["out"][position:, column] = result["state"][0, :, :, column] = 0
    np.testing.assert_array_equal(got["out"], want["out"])
    np.testing.assert_array_equal(got["state"], want["state"])


@each_profile
@each_form
@pytest.mark.parametrize(("k", "w"), [(24, 40), (99, 70)])
def test_f12_columns_of_any_size_are_float32(
    profile: TargetProfile, form: Form, k: int, w: int
) -> None:
    """Values and states of 1e-15 to 1e15 side by side: each column is as exact as alone."""
    op = form(1, k, w, "float32")
    inputs = inputs_of(op, [(0, 0, 50, 0)])
    sizes = 10.0 ** np.random.default_rng(8).integers(-15, 16, w)
    inputs["qkv"][:, 2 * k :] *= sizes
    inputs["state"] *= sizes
    got, want = run(op, profile, inputs), expect(op, inputs)
    for j in range(w):
        assert relative_error(got["out"][:, j], want["out"][:, j]) <= tolerance("kda")
        columns = (result["state"][0, 0, :, j] for result in (got, want))
        assert relative_error(*columns) <= tolerance("kda")


@each_profile
@pytest.mark.parametrize("lowest", [-5.0, -40.0])
def test_f12_what_is_forgotten_costs_no_digits(profile: TargetProfile, lowest: float) -> None:
    """A row of values 1e4 times the others, of which four decays leave nothing, in one chunk."""
    op = KdaChunk(1, 128, 128, "float32")
    inputs = inputs_of(op, [(0, 0, 16, 0)], lowest=-0.1)
    inputs["state"][:] = 0
    inputs["qkv"][0, 256:] *= 1e4
    inputs["decay"][1:5] = np.exp(lowest)
    got, want = run(op, profile, inputs), expect(op, inputs)
    assert relative_error(got["out"][5:], want["out"][5:]) <= tolerance("kda")
    assert relative_error(got["state"][0], want["state"][0]) <= tolerance("kda")


@each_profile
def test_f3_step_continues_what_chunk_began(profile: TargetProfile) -> None:
    """A prompt by chunks, then single steps: the state means the same to both."""
    chunk, step = KdaChunk(2, 24, 40, "float32"), KdaStep(2, 24, 40, "float32")
    inputs = inputs_of(chunk, [(0, 0, 40, 0)])
    want = expect(chunk, inputs)
    state = run(chunk, profile, only(inputs, 0, 33))["state"]
    for t in range(33, 40):
        got = run(step, profile, only(inputs, t, t + 1, 0, state))
        state = got["state"]
        assert relative_error(got["out"], want["out"][t : t + 1]) <= tolerance("kda")
    assert relative_error(state[0], want["state"][0]) <= tolerance("kda")


@each_profile
@each_form
def test_l2_norm_adds_1e_6_to_the_sum_inside_the_root(profile: TargetProfile, form: Form) -> None:
    """Small keys show the eps: from an empty state, with q = k, o = v*s / (s + 1e-6) / sqrt(K)."""
    op = form(1, 32, 32, "float32")
    inputs = inputs_of(op, [(0, 0, 1, 0)])
    sizes = 1e-3 * np.random.default_rng(2).standard_normal(32)
    inputs["qkv"][0, :32] = inputs["qkv"][0, 32:64] = sizes
    inputs["beta"][:] = 1
    inputs["state"][:] = 0
    total = np.sum(sizes**2)
    want = inputs["qkv"][0, 64:] * total / (total + 1e-6) / np.sqrt(32)
    assert relative_error(run(op, profile, inputs)["out"][0], want) <= tolerance("kda")
    inputs["qkv"][0, :64] = 0
    assert not run(op, profile, inputs)["out"].any()


# --- decays -------------------------------------------------------------------------------------


def log_decays(case: str, shape: tuple[int, ...]) -> np.ndarray:
    """The rows of the decay table of specification 9."""
    rng = np.random.default_rng(5)
    if case == "typical":
        return -5 / (1 + np.exp(-rng.normal(-3, 1, shape)))
    if case == "all -5":
        return np.full(shape, -5.0)
    return rng.uniform(-40 if case == "uniform -40..0" else -5, 0, shape)


def through_gate(
    profile: TargetProfile, g: np.ndarray, heads: int, bound: float | None
) -> tuple[Inputs, Inputs]:
    """Decays of the gate kernel whose raw input asks for log decays g; and the exact ones."""
    with np.errstate(divide="ignore"):
        raw = np.log(np.expm1(-g)) if bound is None else -np.log(np.maximum(bound / g - 1, 1e-30))
    op = KdaGate(heads, g.shape[1] // heads, bound, heads, 0)
    inputs = {
        "raw": raw.astype(np.float32),
        "x": np.random.default_rng(6).standard_normal((len(g), heads), np.float32),
        "dt_bias": np.zeros(g.shape[1], np.float32),
        "a": np.ones(heads, np.float32),
    }
    return run(op, profile, inputs), expect(op, inputs)


@each_profile
@each_form
@pytest.mark.parametrize(
    ("case", "bound", "k", "w"),
    [
        ("typical", -5.0, 128, 128),
        ("typical", None, 128, 128),
        ("uniform -5..0", -5.0, 128, 128),
        ("uniform -5..0", -5.0, 37, 53),
        ("uniform -5..0", None, 128, 128),
        ("all -5", -5.0, 128, 128),
        ("all -5", None, 128, 128),
        ("uniform -40..0", None, 128, 128),
        ("uniform -40..0", None, 37, 53),
    ],
)
def test_f10_decay_table(
    profile: TargetProfile, form: Form, case: str, bound: float | None, k: int, w: int
) -> None:
    """Gate and recurrence, both against float64, at every decay of specification 9."""
    op = form(3, k, w, "float32")
    inputs = inputs_of(op, [(1, 0, 200, 0)])
    got_gate, exact_gate = through_gate(profile, log_decays(case, (200, 3 * k)), 3, bound)
    got = run(op, profile, inputs | got_gate)
    want = reference_of(op)(op, SimpleNamespace(**(inputs | exact_gate)))
    assert relative_error(got["out"], want["out"]) <= tolerance("kda")
    assert relative_error(got["state"][1], want["state"][1]) <= tolerance("kda")


@each_profile
@each_form
def test_f10_decay_zero_forgets_everything(profile: TargetProfile, form: Form) -> None:
    """A decay that underflows to 0 in one step: finite, and the past is gone."""
    op = form(2, 24, 40, "float32")
    inputs = inputs_of(op, [(0, 0, 40, 0)])
    inputs["decay"][21] = 0
    other = inputs | {"state": 2 * inputs["state"]}
    got, past = run(op, profile, inputs), run(op, profile, other)
    assert relative_error(got["out"], expect(op, inputs)["out"]) <= tolerance("kda")
    assert not np.array_equal(got["out"][:21], past["out"][:21])
    error = relative_error(past["out"][21:], got["out"][21:])
    assert error <= tolerance("kda")


@pytest.mark.parametrize("form", [KdaStep, KdaChunk], ids=lambda f: f.__name__)
def test_f12_no_drift_in_4096_steps(form: Form) -> None:
    """Slow decays remember every rounding; one to bfloat16 of decay or beta would show."""
    op = form(1, 32, 32, "float32")
    inputs = inputs_of(op, [(0, 0, 4096, 0)], lowest=-0.01)
    want = expect(op, inputs)
    for profile in profiles():
        got = run(op, profile, inputs)
        assert relative_error(got["out"], want["out"]) <= tolerance("kda_drift")
        assert relative_error(got["state"][0], want["state"][0]) <= tolerance("kda_drift")
    for name in ("decay", "beta"):
        rounded = round_to("bfloat16", inputs[name].astype(np.float64)).astype(np.float32)
        coarse = expect(op, inputs | {name: rounded})
        error = relative_error(coarse["state"][0], want["state"][0])
        assert error > 100 * tolerance("kda_drift")


@each_profile
@each_form
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
def test_f12_16_bits_round_the_output_and_nothing_else(
    profile: TargetProfile, form: Form, act: Activation
) -> None:
    """The state after a run in 16 bits has the bits of the float32 run."""
    inputs = inputs_of(form(2, 24, 40, "float32"), MIXED)
    exact = run(form(2, 24, 40, "float32"), profile, inputs)
    coarse = run(form(2, 24, 40, act), profile, inputs)
    np.testing.assert_array_equal(coarse["state"], exact["state"])
    want = round_to(act, exact["out"].astype(np.float64))
    np.testing.assert_array_equal(coarse["out"], want.astype(np.float32))
