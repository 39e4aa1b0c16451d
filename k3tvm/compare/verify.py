"""A bundle against the torch reference on the same parameters, with the reference's own yardstick.

The reference runs in float64 and once more in the bundle's activation dtype; it takes the routing
that the bundle chose, so that a tie between experts is not counted as an error (specification
7.19). The bundle passes when its error is at most twice that of the reference in single precision
(or in bfloat16), which is what the number format itself costs on these weights and ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from k3tvm.compare.metrics import Agreement, agreement
from k3tvm.compare.restore import BundleTensors
from k3tvm.reference import Reference, Routing
from k3tvm.runtime.engine import Engine

FACTOR = 2.0  # in root mean square error; NMSE grows with its square
FLOOR = 1e-13  # NMSE of float32 logits that differ by their last bit alone
Array = np.ndarray[Any, Any]


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
    runs, routing = _run_all(engine, ids)
    pinned = Routing(False, {i: torch.from_numpy(picks).long() for i, picks in routing.items()})
    tensors = BundleTensors(engine.config, engine.manifest.arrays, engine.arrays)
    exact = _reference(engine, tensors, torch.float64, "exact", ids, pinned)
    bfloat16 = engine.manifest.activations == "bfloat16"
    precision: Literal["exact", "bfloat16"] = "bfloat16" if bfloat16 else "exact"
    single = _reference(engine, tensors, torch.float32, precision, ids, pinned)
    yardstick = agreement(single, exact)
    limit = max(yardstick.nmse * FACTOR**2, FLOOR)
    modes = {name: agreement(logits, exact) for name, logits in runs.items()}
    passed = all(a.nmse <= limit for a in modes.values())
    return Verdict(len(ids), engine.manifest.activations, modes, yardstick, limit, passed)


def _run_all(engine: Engine, ids: Sequence[int]) -> tuple[dict[str, Array], dict[int, Array]]:
    engine.reset()
    whole, routing = engine.logits_and_routing(ids, chunk=len(ids))
    engine.reset()
    chunked = engine.logits(ids, chunk=max(1, len(ids) // 3))
    engine.reset()
    steps = np.concatenate([engine.decode([i]) for i in ids])
    engine.reset()
    return {"prefill": whole, "chunked": chunked, "steps": steps}, routing


def _reference(
    engine: Engine,
    tensors: BundleTensors,
    dtype: torch.dtype,
    precision: Literal["exact", "bfloat16"],
    ids: Sequence[int],
    routing: Routing,
) -> Array:
    reference = Reference(engine.config, tensors, dtype, precision)
    logits, _ = reference.forward(list(ids), routing=routing)
    return logits.double().numpy()
