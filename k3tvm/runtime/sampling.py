"""Logits into the next token: greedy, temperature, top-k, top-p, with a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3tvm.errors import DeviceError

Array = np.ndarray[Any, Any]


@dataclass
class Sampler:
    """temperature 0 takes the largest logit (the lowest id on a tie) and ignores the rest.

    top_k: keep that many most likely tokens (0: all). top_p: then keep the smallest set whose
    probabilities sum to at least top_p. The same seed gives the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    _random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or not np.isfinite(self.temperature):
            raise DeviceError(f"temperature {self.temperature}: must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise DeviceError(f"top-p {self.top_p}: must be above 0 and at most 1")
        if self.top_k < 0:
            raise DeviceError(f"top-k {self.top_k}: must be 0 (all) or more")
        if self.seed < 0:
            raise DeviceError(f"seed {self.seed}: must be 0 or more")
        self._random = np.random.default_rng(self.seed)

    def pick(self, logits: Array) -> int:
        """The next token id from logits [vocab]."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        best = logits[order].astype(np.float64)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -infinity
            p = np.exp((best - best[0]) / self.temperature)
        p /= p.sum()
        before = np.cumsum(p) - p
        kept = before < self.top_p  # always keeps the most likely one
        p = np.where(kept, p, 0.0)
        return int(order[self._random.choice(len(p), p=p / p.sum())])
