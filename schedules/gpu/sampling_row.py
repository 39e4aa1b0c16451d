"""A row of logits on a GPU: its keys, its masses, and what a cut keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Sample
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.elementwise import lanes_for
from k3tvm.schedules.sampling import NOTHING

THREADS = 256
BITS = 4  # of one digit
BINS = 1 << BITS
SEGMENT = THREADS // BINS
LOADS = 4  # vectors that a thread loads before it looks at the first


@dataclass(frozen=True)
class Row:
    """A row and its workgroup. best: the largest logit; masses are relative to its own.

    columns [BINS * THREADS], partial [THREADS], totals [BINS]: shared memory.
    """

    op: Sample
    a: SimpleNamespace
    row: Any
    tid: Any
    best: Any
    temperature: Any
    columns: Any
    partial: Any
    totals: Any

    def mass(self, x: Any) -> Any:
        """Probability of a logit, relative to the largest; 0 for NaN."""
        # the largest may be infinite
        below = T.Select(x == self.best, g.floats(0.0), (x - self.best) / self.temperature)
        share = f.exp(g.let(below))
        return g.let(T.Select(key_of(x) == T.int32(NOTHING), g.floats(0.0), share))


@dataclass(frozen=True)
class Cut:
    """What top-k or top-p keeps: keys above `key`, and the first `ties` of those equal to it.

    There are `equals` of them, if known.
    """

    key: Any
    ties: Any
    equals: Any = None


def key_of(x: Any) -> Any:
    """An int32 that orders as the float32 does: NaN first of all, both zeros the same."""
    raw = g.let(g.bits(x, "int32"))
    magnitude = g.let(T.bitwise_and(raw, T.int32(0x7FFFFFFF)))
    key = T.bitwise_xor(raw, T.bitwise_and(raw >> T.int32(31), T.int32(0x7FFFFFFF)))
    key = T.Select(magnitude == T.int32(0), T.int32(0), key)
    # through memory: TVM would repeat the whole expression wherever the key is used
    return g.variable(T.Select(magnitude > T.int32(0x7F800000), T.int32(NOTHING), key))[0]


def logit_of(key: Any) -> Any:
    """The logit of a key."""
    flipped = T.bitwise_xor(key, T.bitwise_and(key >> T.int32(31), T.int32(0x7FFFFFFF)))
    return g.let(g.bits(g.let(flipped), "float32"))


@contextmanager
def each_logit(op: Sample, a: SimpleNamespace, row: Any, tid: Any) -> Iterator[tuple[Any, Any]]:
    """The share of one thread of a row, in ascending order: yields (id, logit).

    Several loads are on their way at a time, since one workgroup alone must hide their latency.
    """
    lanes = lanes_for(op.vocab)
    step = THREADS * lanes
    with g.serial(-(-op.vocab // (step * LOADS))) as turn:
        first = g.let(turn * T.int32(step * LOADS) + tid * T.int32(lanes))
        cell = g.local(lanes * LOADS)
        for k in range(LOADS):
            at = T.min(first + T.int32(k * step), T.int32(op.vocab - lanes))
            g.store(cell, g.load(a.logits, row, at, lanes=lanes), k * lanes, lanes=lanes)
        with g.serial(lanes * LOADS) as j:
            i = g.let(first + j // T.int32(lanes) * T.int32(step) + j % T.int32(lanes))
            with g.when(i < T.int32(op.vocab)):
                yield i, g.let(cell[j])
