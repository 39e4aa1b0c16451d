"""NaN and infinity in weights: a named place, a slot that starts anew, others left right (F11)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from k3tvm.runtime.engine import Engine
from k3tvm.runtime.health import BadLogits
from tests.bundles import Bundles
from tests.devices import TARGETS
from tests.truth import in_cuts, random_prompt

# What is damaged, and what the error must say; KDA layers are 0, 1, 3, 4 and MLA 2, 5, 6.
PLACES = {
    "embed.table": "the embedding",
    "layers.0.mixer.norm": "layer 0 (attention)",
    "layers.1.mixer.out.weight": "layer 1 (attention)",
    "layers.3.mixer.a": "layer 3 (attention)",
    "layers.2.mixer.kv_norm": "layer 2 (attention)",
    "layers.5.mixer.out.weight": "layer 5 (attention)",
    "layers.0.ffn.out.weight": "layer 0 (feed-forward)",
    "layers.4.ffn.experts_in.scale": "layer 4 (feed-forward)",
    "layers.6.ffn.shared_out.weight": "layer 6 (feed-forward)",
    "head.norm": "the final norm or the output head",
    "head.head.weight": "the final norm or the output head",
}
# A NaN in the bits of each storage dtype; MXFP4 has NaN only as a block scale.
NAN = {"float32": np.float32(np.nan), "uint16": 0x7FC0, "uint32": 0x7FC07FC0, "uint8": 255}


@pytest.fixture(scope="module", params=TARGETS)
def engine(bundles: Bundles, request: pytest.FixtureRequest) -> Engine:
    return bundles.engine("k3-tiny", target=request.param)


@contextmanager
def damaged(engine: Engine, name: str, index: Any = ..., value: Any = None) -> Iterator[None]:
    """NaN, or `value`, in a parameter of this engine while the block runs; arrays are its own."""
    at = [a.name for a in engine.manifest.arrays].index(name)
    array = engine.arrays[at]
    before = array.copy()
    array[index] = NAN[array.dtype.name] if value is None else value
    hand_over(engine, at)
    yield
    array[...] = before
    hand_over(engine, at)


def hand_over(engine: Engine, at: int) -> None:
    """Let the device have what the host's array holds now."""
    if engine.device.label != "cpu":
        engine.device.memory.write(engine._weights[at], engine.arrays[at])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_error_names_the_part_that_made_it(engine: Engine, place: str, tokens: int) -> None:
    """By decode and by prefill; the slot is empty afterwards and the next request is right."""
    ids = random_prompt(engine, 30, seed=1)
    engine.reset(1)
    want = engine.prefill(ids, slot=1)
    engine.reset(1)
    engine.prefill(ids[:5], slot=1)
    with damaged(engine, place), pytest.raises(BadLogits) as caught:
        engine.prefill(ids[:tokens], 1) if tokens > 1 else engine.decode(ids[:1], [1])
    assert f"first seen in {PLACES[place]};" in str(caught.value).replace(", counting from 0", "")
    assert caught.value.slots == (1,) and "slot 1 reset" in str(caught.value)
    assert engine.position(1) == 0 and "\n" not in str(caught.value)
    np.testing.assert_array_equal(engine.prefill(ids, slot=1), want)


def test_one_bad_embedding_row_hits_only_the_slot_that_reads_it(engine: Engine) -> None:
    """The other slots' logits are in the error, their state has moved on, and stays right."""
    prompts = [random_prompt(engine, n, seed=n) for n in (3, 8, 20)]
    others = [[5, 6, 7], [9, 10, 11]]
    want = []
    for prompt, tokens in zip((prompts[0], prompts[2]), others, strict=True):
        engine.reset()
        engine.prefill(prompt)
        want.append(np.stack([engine.decode([t])[0] for t in tokens]))
    for slot, prompt in enumerate(prompts):
        engine.reset(slot)
        engine.prefill(prompt, slot)
    got = [engine.decode([5, 6, 9], [0, 1, 2])]
    with damaged(engine, "embed.table", 77), pytest.raises(BadLogits) as caught:
        engine.decode([6, 77, 10], [0, 1, 2])
    assert caught.value.slots == (1,) and "the embedding" in str(caught.value)
    assert [engine.position(s) for s in range(3)] == [5, 0, 22]
    got += [caught.value.logits, engine.decode([7, 3, 11], [0, 1, 2])]
    for row in (0, 2):
        rows = np.stack([logits[row] for logits in got])
        np.testing.assert_array_equal(rows, want[row // 2])
    fresh = Engine.open(engine.folder, slots=1)
    np.testing.assert_array_equal(got[-1][1], fresh.decode([3])[0])


def test_a_bad_expert_hits_only_tokens_that_chose_it(engine: Engine) -> None:
    """Two slots, one of which meets the damaged expert of layer 4."""
    run = in_cuts(engine, list(range(60)), [1] * 60)
    layer = run.routing[4]
    singles = {}
    for token in range(60):
        engine.reset()
        engine.decode([token])
        singles[token] = set(engine.routing()[4][0].tolist())
    expert = int(layer[0, 0])
    hit = next(t for t, chosen in singles.items() if expert in chosen)
    safe = next(t for t, chosen in singles.items() if expert not in chosen)
    engine.reset(0)
    want = engine.decode([safe], [0])[0]
    for slot in range(2):
        engine.reset(slot)
    with (
        damaged(engine, "layers.4.ffn.experts_out.scale", expert),
        pytest.raises(BadLogits) as caught,
    ):
        engine.decode([safe, hit], [0, 1])
    assert caught.value.slots == (1,) and "layer 4 (feed-forward)" in str(caught.value)
    np.testing.assert_array_equal(caught.value.logits[0], want)


def test_a_flag_without_bad_logits_does_not_mislead_a_later_error(engine: Engine) -> None:
    """Only a token in the middle meets the bad expert of the last layer: the last row is fine."""
    ids = random_prompt(engine, 12, seed=2)
    engine.reset()
    _, routing = engine.logits_and_routing(ids, chunk=12)
    middle, last = set(routing[6][3].tolist()), set(routing[6][-1].tolist())
    expert = (middle - last).pop()
    engine.reset()
    with damaged(engine, "layers.6.ffn.experts_in.scale", expert):
        assert np.isfinite(engine.prefill(ids)).all()
    with damaged(engine, "head.head.weight"), pytest.raises(BadLogits, match="output head"):
        engine.decode([1])


def test_an_infinite_weight_is_found_as_well(engine: Engine) -> None:
    engine.reset()
    with (
        damaged(engine, "layers.3.ffn.norm", 5, np.inf),
        pytest.raises(BadLogits, match=r"layer 3 \(feed-forward\)"),
    ):
        engine.prefill([1, 2, 3])
    assert np.isfinite(engine.prefill([1, 2, 3])).all()
