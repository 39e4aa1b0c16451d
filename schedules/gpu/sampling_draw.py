"""A draw from the tokens that a cut keeps, on a GPU.

The row is narrowed in turns: the threads share a range, and the part in which the running sum
passes its target is the next range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.sampling_row import BINS, SEGMENT, THREADS, Cut, Row, key_of, logit_of
from k3tvm.schedules.sampling import UNIFORM


def draw(r: Row, cut: Cut, marks: Any) -> None:
    """ids[row] = the token where the running sum over what is kept passes u of the whole."""
    start, length = g.variable(0, "int32"), g.variable(r.op.vocab, "int32")
    before, used, target = g.variable(0.0), g.variable(0, "int32"), g.variable(0.0)
    tied_mass = r.mass(logit_of(cut.key))
    spans, turns = r.op.vocab, 0
    while spans > 1:
        spans, turns = -(-spans // THREADS), turns + 1
    with g.serial(max(turns, 1)) as turn:
        span = g.let((length[0] + T.int32(THREADS - 1)) // T.int32(THREADS))
        first = g.let(start[0] + r.tid * span)
        stop = g.let(T.min(first + span, start[0] + length[0]))
        larger, equal = _masses(r, cut, first, stop)
        equals = _running(r, g.cast(equal, "float32"))
        earlier = g.let(used[0] + g.cast(equals(r.tid), "int32") - equal)
        kept = g.let(T.max(T.min(cut.ties - earlier, equal), T.int32(0)))
        mass = g.let(larger + g.cast(kept, "float32") * tied_mass)
        sums = _running(r, mass)
        whole = sums(T.int32(THREADS - 1))
        with g.when(turn == T.int32(0)):
            g.put(target, whole * r.a.controls[r.row, UNIFORM])
        own, previous = sums(r.tid), sums(T.max(r.tid - T.int32(1), T.int32(0)))
        mine = _passes(before[0], own, target[0], whole)
        theirs = T.And(r.tid > T.int32(0), _passes(before[0], previous, target[0], whole))
        with g.when(T.And(mine, T.Not(theirs))):
            base = g.let(T.Select(r.tid > T.int32(0), previous, g.floats(0.0)))
            g.store(marks, first, 0)
            g.store(marks, stop - first, 1)
            g.store(marks, earlier, 2)
            g.store(r.partial, before[0] + base, 0)
        g.barrier()
        g.put(start, marks[T.int32(0)])
        g.put(length, marks[T.int32(1)])
        g.put(used, marks[T.int32(2)])
        g.put(before, r.partial[T.int32(0)])
        g.barrier()
    with g.when(r.tid == T.int32(0)):
        g.store(r.a.ids, start[0], r.row)


def _passes(before: Any, running: Any, target: Any, whole: Any) -> Any:
    """Whether the target is passed; at the end of the range at the latest, whatever rounding did.

    Running sums never fall, so the first thread that passes has mass of its own.
    """
    return T.Or(before + running > target, running >= whole)


def _masses(r: Row, cut: Cut, first: Any, stop: Any) -> tuple[Any, Any]:
    """Of tokens first <= i < stop: the mass above the cut, and how many are tied at it."""
    larger, equal = g.variable(0.0), g.variable(0, "int32")
    with g.serial_range(first, T.max(first, stop)) as i:
        x = g.let(r.a.logits[r.row, i])
        key = key_of(x)
        with g.when(key > cut.key):
            g.put(larger, larger[0] + r.mass(x))
        g.put(equal, equal[0] + T.Select(key == cut.key, T.int32(1), T.int32(0)))
    return g.let(larger[0]), g.let(equal[0])


def _running(r: Row, value: Any) -> Callable[[Any], Any]:
    """Running sums over the threads, inclusive: of thread t by calling the result with t.

    In segments, so that no sum is ever smaller than the one before it.
    """
    g.barrier()
    g.store(r.columns, value, r.tid)
    g.barrier()
    with g.when(r.tid < T.int32(BINS)):
        total = g.variable(0.0)
        with g.serial(SEGMENT) as j:
            at = g.let(r.tid * T.int32(SEGMENT) + j)
            g.put(total, total[0] + r.columns[at])
            g.store(r.columns, total[0], at)
    g.barrier()
    with g.when(r.tid == T.int32(0)):
        total = g.variable(0.0)
        with g.serial(BINS) as j:
            g.store(r.totals, total[0], j)
            g.put(total, total[0] + r.columns[j * T.int32(SEGMENT) + T.int32(SEGMENT - 1)])
    g.barrier()
    return lambda t: g.let(r.totals[t // T.int32(SEGMENT)] + r.columns[t])
