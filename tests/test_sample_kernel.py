"""The sampling kernels: thresholds, ties, borders, bad logits, and the shape of a distribution."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import Sample
from k3tvm.schedules.sampling import kept_mass
from tests.kernels import expect, profiles, run
from tests.tolerances import tolerance

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)


def inputs_of(logits, temperature, top_k=0, top_p=1.0, u=0.0) -> dict[str, np.ndarray]:
    """Inputs of the operator; scalars are the same for all rows."""
    rows = len(logits)
    controls = np.zeros((rows, 4), np.float32)
    controls[:, 0], controls[:, 1], controls[:, 2] = temperature, top_p, u
    return {
        "logits": np.asarray(logits, np.float32),
        "controls": controls,
        "top_k": np.broadcast_to(np.int32(top_k), rows).copy(),
    }


def ids_of(profile, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The kernel's answer."""
    return run(Sample(inputs["logits"].shape[1]), profile, inputs)["ids"]


def safe_draws(inputs: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The same inputs with draws in the middle of what a token owns, never near its border."""
    controls = inputs["controls"].copy()
    for row, logits in enumerate(inputs["logits"]):
        temperature, top_p = (float(c) for c in controls[row, :2])
        mass = kept_mass(logits, temperature, top_p, int(inputs["top_k"][row]))
        share = mass / mass.sum()
        token = rng.choice(np.flatnonzero(share > 100 * tolerance("sample_border")))
        controls[row, 2] = np.cumsum(share)[token] - share[token] * rng.uniform(0.1, 0.9)
    return inputs | {"controls": controls}


def away_from_the_cut(logits, temperature, top_k, wanted) -> float:
    """A top-p near `wanted` in the middle of the token at which it cuts; 1 stays 1."""
    if wanted == 1:
        return 1.0
    mass = np.sort(kept_mass(logits, temperature, 1.0, top_k))[::-1]
    running = np.cumsum(mass) / mass.sum()
    at = int(np.searchsorted(running, wanted))
    return float(running[at] - 0.5 * mass[at] / mass.sum())


@PROFILES
@pytest.mark.parametrize("vocab", [1, 7, 300, 1001])
def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie(profile, vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (6, vocab)).astype(np.float32)
    logits[5] *= -0.0
    inputs = inputs_of(logits, 0.0, top_k=3, top_p=0.5, u=0.9)
    np.testing.assert_array_equal(ids_of(profile, inputs), logits.argmax(1))


@PROFILES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f11_nan_is_never_chosen_unless_there_is_nothing_else(profile, temperature):
    nan, inf = np.nan, np.inf
    logits = [
        [nan, 1, nan, 0.5, nan],
        [nan, -inf, nan, -inf, nan],
        [nan] * 5,
        [-nan, nan, nan, nan, -3],
        [1, inf, 2, inf, nan],
        [nan, -inf, 7, -inf, -inf],
    ]
    want = [1, 1, 0, 4, 1, 2]
    for top_k, top_p in ((0, 1.0), (1, 1.0), (3, 0.4)):
        inputs = inputs_of(logits, temperature, top_k, top_p)
        assert ids_of(profile, inputs).tolist() == want
        assert expect(Sample(5), inputs)["ids"].tolist() == want


@PROFILES
@pytest.mark.parametrize("vocab", [5, 300, 1001])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.7), (50, 0.9), (9999, 0.2)])
def test_draws_are_those_of_the_reference(profile, vocab, top_k, top_p):
    rng = np.random.default_rng(vocab + top_k)
    logits = 4 * rng.standard_normal((12, vocab)).astype(np.float32) - 2
    inputs = inputs_of(logits, 1.0, top_k)
    inputs["controls"][:, 0] = rng.uniform(0.3, 2, 12)
    for row, (x, t) in enumerate(zip(logits, inputs["controls"][:, 0], strict=True)):
        inputs["controls"][row, 1] = away_from_the_cut(x, float(t), top_k, top_p)
    inputs = safe_draws(inputs, rng)
    np.testing.assert_array_equal(ids_of(profile, inputs), expect(Sample(vocab), inputs)["ids"])


@PROFILES
def test_ties_at_a_threshold_keep_the_lower_ids(profile):
    """Eight equal logits over two larger ones: what remains of them is decided by their ids."""
    logits = np.full(600, -9.0, np.float32)
    logits[[5, 590]] = 2.0
    tied = [0, 17, 200, 201, 300, 470, 555, 599]
    logits[tied] = 1.0
    rows = np.stack([logits] * 9)
    draws = np.linspace(0.02, 0.98, 9)
    for top_k, top_p, kept in ((5, 1.0, 5), (2, 1.0, 2), (0, 0.62, 5), (7, 0.7, 4)):
        mass = kept_mass(logits, 1.0, top_p, top_k)
        assert np.flatnonzero(mass).tolist() == sorted([5, 590, *tied[: kept - 2]])
        inputs = inputs_of(rows, 1.0, top_k, top_p, draws)
        want = expect(Sample(600), inputs)["ids"]
        np.testing.assert_array_equal(ids_of(profile, inputs), want)
        assert set(want) <= set(np.flatnonzero(mass))


@PROFILES
def test_f5_rows_have_settings_of_their_own(profile):
    rng = np.random.default_rng(2)
    logits = np.repeat(3 * rng.standard_normal((1, 97)).astype(np.float32), 4, axis=0)
    inputs = inputs_of(logits, np.array([0.0, 1.0, 1.0, 1e-30]), u=0.999)
    inputs["top_k"][:] = [0, 1, 0, 5]
    ids = ids_of(profile, inputs)
    best = logits[0].argmax()
    assert [int(i) == best for i in ids] == [True, True, False, True]
    np.testing.assert_array_equal(ids, expect(Sample(97), inputs)["ids"])


@PROFILES
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.8)])
def test_many_draws_follow_the_distribution(profile, top_k, top_p):
    """Evenly spaced draws: every token's share is exact to one draw and a rounding."""
    draws = 997
    logits = 2 * np.random.default_rng(1).standard_normal(11).astype(np.float32)
    u = (np.arange(draws) + 0.5) / draws
    inputs = inputs_of(np.repeat(logits[None], draws, axis=0), 0.8, top_k, top_p, u)
    count = np.bincount(ids_of(profile, inputs), minlength=11)
    mass = kept_mass(logits, float(np.float32(0.8)), float(np.float32(top_p)), top_k)
    assert np.abs(count - draws * mass / mass.sum()).max() <= 1 + draws * tolerance("sample_border")
    assert not count[mass == 0].any()


@PROFILES
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 0.9), (0, 0.9)])
def test_the_whole_vocabulary(profile, top_k, top_p):
    vocab, rng = 163840, np.random.default_rng(5)
    logits = 3 * rng.standard_normal((2, vocab)).astype(np.float32)
    logits[:, rng.integers(0, vocab, 20)] += 12
    inputs = inputs_of(logits, 1.0, top_k)
    for row in range(2):
        inputs["controls"][row, 1] = away_from_the_cut(logits[row], 1.0, top_k, top_p)
    inputs = safe_draws(inputs, rng)
    np.testing.assert_array_equal(ids_of(profile, inputs), expect(Sample(vocab), inputs)["ids"])
