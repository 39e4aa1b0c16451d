"""What an operator must move, by its definition alone: every part that it needs, once.

An input is read once, a result written once, a state that changes is both. Of tensors of which only
a part is needed, `PARTS` says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from k3tvm.bundle.kernels import Minimum, Point
from k3tvm.bundle.manifest import DTYPES
from k3tvm.relax_models.operators import Arg, ExpertLinear, Operator
from k3tvm.report.points import integers, scalars, shape_of

Elements = tuple[int, int]  # that must be read, and written
Rule = Callable[[Any, Point, Arg], Elements]


def minimum(op: Operator, point: Point, calls: int = 1) -> Minimum:
    """Bytes that any kernel of the operator must move at a point."""
    read = written = 0
    for a in op.arguments():
        more, less = _elements(op, point, a)
        read += more * DTYPES[a.dtype]
        written += less * DTYPES[a.dtype]
    return Minimum(point.name, calls, read, written)


def _elements(op: Operator, point: Point, a: Arg) -> Elements:
    rule = PARTS.get((type(op).__name__, a.name)) or PARTS.get(("", a.name))
    if rule is not None:
        return rule(op, point, a)
    count = math.prod(shape_of(a, point))
    if isinstance(op, ExpertLinear) and a.name.startswith("weight"):
        chosen = len(np.unique(integers(op, point)["chosen"]))
        count = count // op.experts * chosen
    return (0 if a.role == "out" else count), (0 if a.role == "in" else count)


def _columns(width: Callable[[Any], int]) -> Rule:
    """Some columns of the rows of an input."""
    return lambda op, point, a: (point.rows * width(op), 0)


def _nothing(op: Any, point: Point, a: Arg) -> Elements:
    return 0, 0


def _entries(op: Any, point: Point, a: Arg) -> Elements:
    """The bank: `count` entries are read, or one is written."""
    each = math.prod(shape_of(a, point)) // op.entries
    return (0, each) if a.role == "inout" else (scalars(op)["count"] * each, 0)


def _cached(op: Any, point: Point, a: Arg) -> Elements:
    """The cache up to the last token."""
    tokens = point.sequences * (point.cached + point.rows // point.sequences)
    return tokens * shape_of(a, point)[-1], 0


PARTS: dict[tuple[str, str], Rule] = {
    ("", "health"): _nothing,  # written where a row is not finite
    ("", "seqs"): _nothing,  # few integers, of which not all are always needed
    ("Sample", "controls"): lambda op, point, a: (3 * point.sequences, 0),
    ("", "bank"): _entries,
    ("", "inverse_rms"): _entries,
    ("Embed", "table"): lambda op, point, a: (
        len(np.unique(integers(op, point)["ids"])) * op.width,
        0,
    ),
    ("Linear", "x"): _columns(
        lambda op: (
            op.k + (op.groups - 1) * min(op.k, op.x_stride or op.k) if op.groups > 1 else op.k
        )
    ),
    ("LastRows", "x"): lambda op, point, a: (point.sequences * op.width, 0),
    ("ShortConv", "x"): _columns(lambda op: op.channels),
    ("KdaGate", "x"): _columns(lambda op: op.heads),
    ("KdaStepFused", "x"): _columns(lambda op: 3 * op.heads * op.dim),
    ("KdaStepFused", "write"): _columns(lambda op: op.heads),
    ("KdaStepFused", "gate"): _columns(lambda op: op.heads * op.dim),
    ("GatedRmsNorm", "gate"): _columns(lambda op: op.heads * op.dim),
    ("MlaCache", "x"): _columns(lambda op: op.q_rank + op.rank + op.rope),
    ("MlaCache", "q_norm"): lambda op, point, a: (op.q_rank, 0),
    ("MlaCache", "cache"): lambda op, point, a: (0, point.rows * (op.rank + op.rope)),
    ("MlaCache", "query"): lambda op, point, a: (0, point.rows * op.q_rank),
    ("MlaAttention", "q"): _columns(lambda op: op.heads * op.rope),
    ("MlaAttention", "cache"): _cached,
    ("SigmoidGate", "gate"): _columns(lambda op: op.width),
    ("Glu", "x"): _columns(lambda op: op.parts * 2 * op.width),
    ("Router", "x"): _columns(lambda op: op.experts),
    ("ExpertLinear", "x"): _columns(lambda op: op.k * (op.top_k if op.per_choice else 1)),
    ("ExpertCombine", "norm_weight"): lambda op, point, a: (op.width if op.norm else 0, 0),
    ("ExpertLinear", "first"): _nothing,
    ("ExpertLinear", "order"): _nothing,
}
