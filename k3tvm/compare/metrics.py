"""Two arrays of logits into the figures by which people judge them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Agreement:
    """How far `got` is from `want`, both [n, vocab].

    nmse: sum of squared differences over the sum of squares of `want`. max_error, mean_error:
    absolute, of single logits. top1: share of rows with the same most likely id. top10: mean
    overlap of the ten most likely ids, as a share.
    """

    nmse: float
    max_error: float
    mean_error: float
    top1: float
    top10: float


def nmse(got: Array, want: Array) -> float:
    """Normalised mean squared error; infinite when `got` is not finite."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    return float(((got - want) ** 2).sum() / (want**2).sum())


def agreement(got: Array, want: Array) -> Agreement:
    """All figures at once."""
    difference = np.abs(got.astype(np.float64) - want)
    top_got, top_want = _top(got, 10), _top(want, 10)
    shared = [
        len(set(a) & set(b)) / len(a)
        for a, b in zip(top_got.tolist(), top_want.tolist(), strict=True)
    ]
    return Agreement(
        nmse=nmse(got, want),
        max_error=float(difference.max()),
        mean_error=float(difference.mean()),
        top1=float((top_got[:, 0] == top_want[:, 0]).mean()),
        top10=float(np.mean(shared)),
    )


def _top(logits: Array, count: int) -> Array:
    return np.argsort(-logits, axis=1, kind="stable")[:, :count]
