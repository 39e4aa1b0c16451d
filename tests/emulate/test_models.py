"""Whole models on emulated CUDA and Metal: the numbers of the CPU, in every order of threads."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm import emulate
from k3tvm.checkpoint.presets import PRESETS
from k3tvm.runtime.engine import Engine
from tests.bundles import Bundles
from tests.emulate.rig import SEEDS
from tests.tolerances import tolerance

TARGETS = ("cuda-emulated", "metal-emulated")
SMALL = [name for name in PRESETS if "tiny" in name]
CUTS = (20, 1, 16, 3)  # of a prompt: tiles, a step, exactly a chunk, a short rest
STEPS = ([1], [2, 0], [0, 2, 1], [1])  # slots of each decode step

pytestmark = pytest.mark.usefixtures("forward")


@pytest.fixture
def forward():
    yield
    emulate.set_seed(0)


def run(engine: Engine) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits and experts of a prompt in pieces in three slots, then steps of several slots."""
    ids = np.random.default_rng(5).integers(0, engine.config.vocab_size, 80)
    logits, experts = [], []
    for slot in range(3):
        engine.reset(slot)
        at = slot
        for cut in CUTS[slot:]:
            values, routing = engine.logits_and_routing(ids[at : at + cut], slot)
            logits.append(values)
            experts += routing.values()
            at += cut
    for i, slots in enumerate(STEPS):
        logits.append(engine.decode(ids[60 + i : 60 + i + len(slots)], slots))
        experts += engine.routing().values()
    return logits, experts


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("preset", SMALL)
def test_the_numbers_are_those_of_the_cpu(bundles: Bundles, preset: str, target: str) -> None:
    """Same experts, and logits within other orders of summation."""
    want, chosen = run(bundles.engine(preset))
    got, choices = run(bundles.engine(preset, target=target))
    for a, b in zip(chosen, choices, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(want, got, strict=True):
        assert np.square(a - b).sum() <= tolerance("devices") * np.square(a).sum()


@pytest.mark.parametrize("target", TARGETS)
def test_three_orders_of_threads_give_the_same_bits(bundles: Bundles, target: str) -> None:
    """A kernel that forgot a barrier would not."""
    engine = bundles.engine("k3-tiny", target=target)
    results = []
    for seed in SEEDS:
        emulate.set_seed(seed)
        results.append(run(engine)[0])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_device_says_emulated(bundles: Bundles) -> None:
    assert "emulated" in bundles.engine("k3-tiny", target="cuda-emulated").device.label
