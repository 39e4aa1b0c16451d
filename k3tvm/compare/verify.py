"""A bundle against the torch reference on the same parameters, with the reference's own yardstick.

The reference runs in float64 and once more in the bundle's activation dtype; it takes the routing
that the bundle chose, so that a tie between experts is not counted as an error (specification
7.19). The bundle passes when its error is at most twice that of the reference in single precision
(or in bfloat16), which is what the number format itself costs on these weights and ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from k3tvm.compare.metrics import Agreement, agreement
from k3tvm.compare.restore import BundleTensors
from k3tvm.reference import Reference, Routing
from k3tvm.runtime.engine import Engine, joined

FACTOR = 2.0  # in root mean square error; NMSE grows with its square
FLOOR = 1e-13  # NMSE of float32 logits that differ by their last bit alone
Array = np.ndarray[Any, Any]
Run = tuple[Array, dict[int, Array]]


@dataclass(frozen=True)
class Verdict:
    """What `verify` found: each mode's agreement, the yardstick's, and whether all are within."""

    tokens: int
    activations: str
    modes: dict[str, Agreement]
    yardstick: Agreement
    limit_nmse: float
    passed: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verify(engine: Engine, ids: Sequence[int]) -> Verdict:
    """Compare one-shot prefill, chunked prefill and step-by-step decode with the reference."""
    tensors = BundleTensors(engine.config, engine.manifest.arrays, engine.arrays)
    act = engine.manifest.activations
    precision: Any = "exact" if act == "float32" else act
    exact = Reference(engine.config, tensors, torch.float64)
    single = Reference(engine.config, tensors, torch.float32, precision)
    runs = _runs(engine, ids)
    truths = {mode: _logits(exact, ids, routing) for mode, (_, routing) in runs.items()}
    own = _logits(single, ids, runs["prefill"][1])
    yardstick = agreement(own, truths["prefill"])
    limit = max(yardstick.nmse * FACTOR**2, FLOOR)
    modes = {mode: agreement(logits, truths[mode]) for mode, (logits, _) in runs.items()}
    passed = all(a.nmse <= limit for a in modes.values())
    return Verdict(len(ids), engine.manifest.activations, modes, yardstick, limit, passed)


def _runs(engine: Engine, ids: Sequence[int]) -> dict[str, Run]:
    """Logits [n, vocab] and routing of every mode."""
    engine.reset()
    runs = {"prefill": engine.logits_and_routing(ids, chunk=len(ids))}
    engine.reset()
    runs["chunked"] = engine.logits_and_routing(ids, chunk=max(1, len(ids) // 3))
    engine.reset()
    steps = [(engine.decode([i]), engine.routing()) for i in ids]
    engine.reset()
    runs["steps"] = np.concatenate([s[0] for s in steps]), joined([s[1] for s in steps])
    return runs


def _logits(reference: Reference, ids: Sequence[int], routing: dict[int, Array]) -> Array:
    """Logits of the reference with the experts that the bundle chose."""
    pinned = Routing(False, {i: torch.from_numpy(e).long() for i, e in routing.items()})
    logits, _ = reference.forward(list(ids), routing=pinned)
    return logits.double().numpy()
