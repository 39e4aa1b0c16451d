"""Prompt ids into new ids, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from k3tvm.runtime.engine import Engine
from k3tvm.runtime.sampling import Sampler


def generate(
    engine: Engine,
    ids: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    stop: Sequence[int] = (),
    slot: int = 0,
) -> Iterator[int]:
    """Read `ids` into a slot and yield up to `max_tokens` sampled ids.

    Ends after an id of `stop` (which is yielded), or when the slot is full.
    """
    logits = engine.prefill(ids, slot)
    for i in range(max_tokens):
        token = sampler.pick(logits)
        yield token
        full = engine.position(slot) >= engine.states.context
        if token in stop or full or i + 1 == max_tokens:
            return
        logits = engine.decode([token], [slot])[0]
