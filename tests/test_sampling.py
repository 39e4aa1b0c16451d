"""The sampler: greedy with ties, temperature, top-k, top-p, seeds, and unusable settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from k3tvm.errors import DeviceError
from k3tvm.runtime.sampling import Sampler

LOGITS = np.log(np.array([0.05, 0.4, 0.05, 0.3, 0.2])).astype(np.float32)


def shares(sampler: Sampler, count: int = 4000) -> np.ndarray:
    """How often each id is drawn."""
    picks = [sampler.pick(LOGITS) for _ in range(count)]
    return np.bincount(picks, minlength=len(LOGITS)) / count


def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie() -> None:
    assert Sampler().pick(LOGITS) == 1
    assert Sampler().pick(np.array([1, 3, 3, 2], np.float32)) == 1
    assert Sampler(top_k=1, top_p=0.1, seed=5).pick(LOGITS) == 1


def test_temperature_one_draws_by_probability() -> None:
    np.testing.assert_allclose(shares(Sampler(1.0)), np.exp(LOGITS), atol=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 3.0):
        p = np.exp(LOGITS / temperature)
        np.testing.assert_allclose(shares(Sampler(temperature)), p / p.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 3, 4}), (99, set(range(5)))]
)
def test_top_k_keeps_the_most_likely(top_k: int, kept: set[int]) -> None:
    drawn = shares(Sampler(1.0, top_k=top_k))
    assert set(np.flatnonzero(drawn)) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 3, 4}),
        (1.0, set(range(5))),
    ],
)
def test_top_p_keeps_the_smallest_set_of_that_mass(top_p: float, kept: set[int]) -> None:
    assert set(np.flatnonzero(shares(Sampler(1.0, top_p=top_p)))) == kept


def test_top_p_works_on_what_top_k_left() -> None:
    """Of 0.4 and 0.3 the first is 4/7 of the mass."""
    assert set(np.flatnonzero(shares(Sampler(1.0, top_k=2, top_p=0.55)))) == {1}
    assert set(np.flatnonzero(shares(Sampler(1.0, top_k=2, top_p=0.6)))) == {1, 3}


def test_a_tie_at_the_border_keeps_the_lower_id() -> None:
    drawn = [Sampler(1.0, top_k=4, seed=s).pick(LOGITS) for s in range(300)]
    assert 0 in drawn and 2 not in drawn


def test_a_seed_fixes_the_draws() -> None:
    first, again, other = ([s.pick(LOGITS) for _ in range(50)] for s in map(seeded, (7, 7, 8)))
    assert first == again != other


def seeded(seed: int) -> Sampler:
    return Sampler(1.0, seed=seed)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e30])
def test_extreme_temperatures_and_logits_stay_numbers(temperature: float) -> None:
    logits = np.array([-3e38, 5.0, 3e38, 2.0], np.float32)
    assert Sampler(temperature).pick(logits) == 2 or temperature > 1
    assert Sampler(temperature).pick(LOGITS) in range(5)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"seed": -1},
    ],
    ids=str,
)
def test_unusable_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(DeviceError, match=name.replace("_", "-")):
        Sampler(**settings)
