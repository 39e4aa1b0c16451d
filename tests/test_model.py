"""Whole models against the float64 reference: every preset, length, chunking, and decode."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from k3tvm.checkpoint.presets import PRESETS
from k3tvm.compare.verify import verify
from k3tvm.runtime.engine import Engine
from tests.bundles import Bundles
from tests.devices import TARGETS
from tests.tolerances import tolerance
from tests.truth import Truth, by_steps, in_cuts, random_prompt

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [name for name in PRESETS if "tiny" in name]
LENGTHS = (1, 2, 3, 4, 17, 64, 65, 200)
BFLOAT16 = ("k3-tiny", "kimi-linear-tiny")


@dataclass(frozen=True)
class Model:
    """A preset's engine and the references on its weights."""

    engine: Engine
    truth: Truth


@pytest.fixture(scope="module", params=itertools.product(TARGETS, SMALL), ids="-".join)
def model(request: pytest.FixtureRequest, bundles: Bundles) -> Model:
    target, preset = request.param
    engine = bundles.engine(preset, target=target)
    return Model(engine, Truth(engine))


def test_f2_f4_one_shot_at_every_length(model: Model) -> None:
    """Lengths 1, 2, conv - 1, conv, around a chunk, and long; short ones over several prompts."""
    for length in LENGTHS:
        prompts = [
            random_prompt(model.engine, length, seed) for seed in range(max(1, 24 // length))
        ]
        runs = [in_cuts(model.engine, ids, [length]) for ids in prompts]
        assert model.truth.ratio(runs) <= tolerance("model_ratio"), length


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 65])
def test_f2_chunks_and_steps_hand_over_their_state(model: Model, chunk: int) -> None:
    ids = random_prompt(model.engine, 130, seed=chunk)
    cuts = [min(chunk, 130 - at) for at in range(0, 130, chunk)]
    assert model.truth.ratio([in_cuts(model.engine, ids, cuts)]) <= tolerance("model_ratio")


def test_f4_chunks_of_length_one_between_others(model: Model) -> None:
    cuts = [1, 2, 3, 1, 4, 1, 1, 60, 1, 17]
    ids = random_prompt(model.engine, sum(cuts), seed=3)
    assert model.truth.ratio([in_cuts(model.engine, ids, cuts)]) <= tolerance("model_ratio")


def test_f2_f3_steps_through_decode(model: Model) -> None:
    """The step form alone, and after a prefill: both forms of the state are one."""
    ids = random_prompt(model.engine, 130, seed=4)
    steps = by_steps(model.engine, ids)
    assert model.truth.ratio([steps]) <= tolerance("model_ratio")
    model.engine.reset()
    model.engine.prefill(ids[:65])
    after = np.concatenate([model.engine.decode([i]) for i in ids[65:]])
    exact = model.truth.logits(steps)[65:]
    ours, single = after - exact, model.truth.logits(steps, "float32")[65:] - exact
    assert np.linalg.norm(ours) <= tolerance("model_ratio") * np.linalg.norm(single)


def test_prefill_gives_the_last_row_of_logits(model: Model) -> None:
    """The entry that skips the head for all other rows."""
    for length in (1, 2, 33, 66):
        ids = random_prompt(model.engine, length, seed=length)
        whole = in_cuts(model.engine, ids, [length]).logits[-1]
        model.engine.reset()
        difference = np.abs(model.engine.prefill(ids) - whole).max()
        assert difference <= tolerance("batch") * np.abs(whole).max()


def test_verify_passes_and_tells_another_model_apart(model: Model) -> None:
    """It must fail when the reference computes something else: here another norm."""
    ids = random_prompt(model.engine, 40, seed=6)
    verdict = verify(model.engine, ids)
    assert verdict.passed and verdict.modes["steps"].top1 == verdict.modes["prefill"].top10 == 1
    other = Engine.open(model.engine.folder)
    other.config = replace(other.config, rms_norm_eps=1e-3)
    assert not verify(other, ids).passed


@pytest.mark.parametrize("preset", BFLOAT16)
def test_bfloat16_stays_within_twice_the_error_of_torch(bundles: Bundles, preset: str) -> None:
    """Against float64, with the reference at the official rounding points as yardstick."""
    engine = bundles.engine(preset, "bfloat16")
    truth = Truth(engine)
    ids = random_prompt(engine, 65, seed=7)
    for run in (in_cuts(engine, ids, [65]), in_cuts(engine, ids, [7] * 9 + [2])):
        assert truth.ratio([run], "bfloat16") <= tolerance("model_ratio")
    assert truth.ratio([by_steps(engine, ids)], "bfloat16") <= tolerance("model_ratio")
    rounded = np.abs(run.logits - truth.logits(run)).max()
    exact = in_cuts(bundles.engine(preset), ids, [65])
    assert rounded > 100 * np.abs(exact.logits - truth.logits(exact)).max()
