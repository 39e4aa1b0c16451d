"""Turns a bundle's own weights and expert choices into the logits of the torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from k3tvm.compare.restore import BundleTensors
from k3tvm.reference import Reference, Routing
from k3tvm.runtime.engine import Engine

Array = np.ndarray[Any, Any]
Picks = dict[int, Array]
Kind = Literal["exact", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Run:
    """What an engine computed: logits [n, vocab] of `ids`, and the experts it chose by layer."""

    ids: Sequence[int]
    logits: Array
    routing: Picks


@dataclass
class Truth:
    """References on the weights of one engine: float64, float32, and the 16-bit precision maps."""

    engine: Engine
    references: dict[Kind, Reference] = field(default_factory=dict)

    def logits(self, run: Run, kind: Kind = "exact") -> Array:
        """Logits [n, vocab] float64 with the experts of the run, so that a tie is no difference."""
        pinned = Routing(False, {i: torch.from_numpy(e).long() for i, e in run.routing.items()})
        logits, _ = self._reference(kind).forward(list(run.ids), routing=pinned)
        return logits.double().numpy()

    def ratio(self, runs: Sequence[Run], yardstick: Kind = "float32") -> float:
        """RMS error of the runs over that of torch in the yardstick's precision, on the same ids.

        Several runs are taken together: one short prompt has too few logits for a steady figure.
        """
        ours = theirs = 0.0
        for run in runs:
            exact = self.logits(run)
            ours += float(((run.logits - exact) ** 2).sum())
            theirs += float(((self.logits(run, yardstick) - exact) ** 2).sum())
        return float(np.sqrt(ours / theirs)) if np.isfinite(ours) else float("inf")

    def _reference(self, kind: Kind) -> Reference:
        if kind not in self.references:
            e = self.engine
            tensors = BundleTensors(e.config, e.manifest.arrays, e.arrays)
            dtype = torch.float64 if kind == "exact" else torch.float32
            precision = "exact" if kind == "float32" else kind
            self.references[kind] = Reference(e.config, tensors, dtype, precision)
        return self.references[kind]


def random_prompt(engine: Engine, count: int, seed: int = 0) -> list[int]:
    """Uniform token ids."""
    return np.random.default_rng(seed).integers(0, engine.config.vocab_size, count).tolist()


def in_cuts(engine: Engine, ids: Sequence[int], cuts: Sequence[int], slot: int = 0) -> Run:
    """Read `ids` into an empty slot in calls of these lengths."""
    engine.reset(slot)
    parts, at = [], 0
    for cut in cuts:
        parts.append(engine.logits_and_routing(ids[at : at + cut], slot, chunk=cut))
        at += cut
    if at != len(ids):
        raise ValueError(f"cuts of {at} for {len(ids)} ids")
    return _joined(ids, parts)


def by_steps(engine: Engine, ids: Sequence[int], slot: int = 0) -> Run:
    """Read `ids` into an empty slot one by one through decode."""
    engine.reset(slot)
    return _joined(ids, [(engine.decode([i], [slot]), engine.routing()) for i in ids])


def _joined(ids: Sequence[int], parts: list[tuple[Array, Picks]]) -> Run:
    routing = {i: np.concatenate([picks[i] for _, picks in parts]) for i in parts[0][1]}
    return Run(ids, np.concatenate([logits for logits, _ in parts]), routing)
