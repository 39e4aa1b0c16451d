"""The sizes at which kernels are looked at, and the integers that steer them there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm.bundle.kernels import Point
from k3tvm.relax_models.operators import Arg, ExpertSort, Operator

CACHED = 4095  # tokens that a sequence has before the one that is decoded

Arrays = dict[str, np.ndarray]


def points_for(rows: int) -> tuple[Point, ...]:
    """A decoded token of one sequence and of 16, and a prefill of as many rows as a call takes."""
    prefill = min(1024, rows)
    return (
        Point("decode", 1, 1, CACHED),
        Point("decode 16", 16, 16, CACHED),
        Point(f"prefill {prefill}", prefill, 1, 0),
    )


def symbols(point: Point) -> dict[str, int]:
    """Values of the symbolic dimensions: a slot and a full cache for every sequence."""
    cap = max(CACHED + 1, point.cached + point.rows // point.sequences)
    return {
        "n": point.rows,
        "m": point.sequences,
        "slots": point.sequences,
        "sites": 1,
        "cap": cap,
    }


def scalars(op: Operator) -> dict[str, int]:
    """Values of the scalar arguments: a full bank for those who read it."""
    full = getattr(op, "entries", 0) if type(op).__name__ != "BankPush" else 0
    return {name: full if name == "count" else 0 for name in op.scalars}


def integers(op: Operator, point: Point) -> Arrays:
    """The integer arguments of an operator by name; experts are drawn evenly, and always alike."""
    found = {}
    for a in op.arguments():
        if a.dtype == "int32" and a.role == "in":
            make = MAKERS.get(a.name)
            shape = [d if isinstance(d, int) else symbols(point)[d] for d in a.shape]
            found[a.name] = make(op, point) if make else np.zeros(shape, np.int64)
    return found


def _seqs(op: Any, point: Point) -> np.ndarray:
    each = point.rows // point.sequences
    s = np.arange(point.sequences)
    rows, cached = np.full_like(s, each), np.full_like(s, point.cached)
    return np.stack([s, s * each, rows, cached], axis=1)


def _ids(op: Any, point: Point) -> np.ndarray:
    return np.arange(point.rows) * 7919 % op.vocab


def _chosen(op: Any, point: Point) -> np.ndarray:
    """Different experts for each row."""
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((point.rows, op.experts)), axis=1)[:, : op.top_k]


def _sorted(op: Any, point: Point) -> dict[str, np.ndarray]:
    from k3tvm.schedules.registry import reference_of

    sort = ExpertSort(op.experts, op.top_k)
    chosen = _chosen(op, point).astype(np.int32)
    return reference_of(sort)(sort, SimpleNamespace(chosen=chosen))


MAKERS: dict[str, Callable[[Any, Point], np.ndarray]] = {
    "seqs": _seqs,
    "ids": _ids,
    "chosen": _chosen,
    "first": lambda op, point: _sorted(op, point)["first"],
    "order": lambda op, point: _sorted(op, point)["order"],
}


def shape_of(argument: Arg, point: Point) -> tuple[int, ...]:
    """The shape of a tensor argument in numbers."""
    values = symbols(point)
    return tuple(d if isinstance(d, int) else values[d] for d in argument.shape)
