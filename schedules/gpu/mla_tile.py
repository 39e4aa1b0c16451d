"""One workgroup's share of a latent attention: a tile of (row, head) pairs and how they are found.

All heads share one cache row per position, so the queries of a sequence are a plain list of
(row, head) pairs. A tile takes consecutive pairs of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal

KEYS = 64  # keys of one block: one step of the softmax
DEPTH = 32  # columns of queries and keys that are in shared memory at a time
PAD = 4  # columns after each row in shared memory, so that rows begin in different banks
SCORES = KEYS + PAD  # places of one pair's scores
KEY_LANES = 16  # threads that share the keys of a block in the scores
COLUMN_LANES = 64  # threads that share the columns of the sum
MOST_SUMS = 64  # registers for a thread's part of the weighted sum


@dataclass(frozen=True)
class Shape:
    """Sizes of a tile: `pairs` of it, `threads` of its workgroup; lanes of loads.

    query_lanes: columns of one load of queries and keys. lanes: of one load of the latent alone.
    """

    pairs: int
    threads: int
    query_lanes: int
    lanes: int
    columns: int

    @property
    def score_pairs(self) -> int:
        """Pairs of one thread in the scores."""
        return self.pairs * KEY_LANES // self.threads

    @property
    def sum_pairs(self) -> int:
        """Pairs of one thread in the weighted sum."""
        return self.pairs * COLUMN_LANES // self.threads

    @property
    def sharers(self) -> int:
        """Threads that share the keys of one pair in the softmax."""
        return self.threads // self.pairs


def shape_of(op: MlaAttention, p: GpuProfile) -> Shape:
    """Enough pairs for the heads of a row, as far as their sums fit into registers."""
    cache = op.rank + op.rope
    lanes = 4 if op.rank % 4 == 0 and cache % 4 == 0 else 1
    rope_at = (op.q_width, op.q_offset + op.nope, op.q_stride)
    query_lanes = lanes if not op.rope or all(v % 4 == 0 for v in rope_at) else 1
    columns = -(-op.rank // (COLUMN_LANES * lanes))
    for pairs, threads in ((32, 256), (16, 256), (8, 128)):
        s = Shape(pairs, threads, query_lanes, lanes, columns)
        fits = s.sum_pairs * columns * lanes <= MOST_SUMS
        if fits and (pairs == 8 or op.heads >= pairs) and threads <= p.threads:
            return s
    raise Refusal(
        f"requires a latent of at most {MOST_SUMS * COLUMN_LANES // 4} columns, got {op.rank}"
    )


@dataclass(frozen=True)
class Tile:
    """Consecutive pairs of one sequence, and the memory of their workgroup.

    slot: of the cache. first: the first pair among all of the call; pairs: how many, places after
    them repeat the last. few, many: keys that every pair and that some pair may see.
    rows, heads, seen [shape.pairs] in shared memory: of each pair; seen is its number of keys.
    scores [pairs, KEYS + PAD], query and key slabs, factors [pairs], partial: shared memory.
    """

    op: MlaAttention
    a: SimpleNamespace
    shape: Shape
    tid: Any
    slot: Any
    first: Any
    pairs: Any
    few: Any
    many: Any
    memory: SimpleNamespace


def tiles_of(op: MlaAttention, shape: Shape, a: SimpleNamespace) -> Any:
    """Tiles that are enough for every division of n rows into m sequences."""
    return a.n * T.int32(op.heads) // T.int32(shape.pairs) + a.m


def shared_memory(shape: Shape) -> SimpleNamespace:
    """The memory of a workgroup; declare it directly inside of the launch."""
    width = DEPTH + PAD
    return SimpleNamespace(
        rows=g.shared(shape.pairs, "int32"),
        heads=g.shared(shape.pairs, "int32"),
        seen=g.shared(shape.pairs, "int32"),
        scores=g.shared(shape.pairs * SCORES),
        query=g.shared(shape.pairs * width),
        key=g.shared(KEYS * width),
        factors=g.shared(shape.pairs),
        partial=g.shared(shape.threads),
    )


@contextmanager
def tile_of(
    op: MlaAttention,
    shape: Shape,
    a: SimpleNamespace,
    index: Any,
    tid: Any,
    memory_of: Callable[[Shape], SimpleNamespace] = shared_memory,
) -> Iterator[Tile]:
    """Tile `index` of the call; the body runs where there is one."""
    memory = memory_of(shape)
    left, owner, inside = g.variable(index), g.variable(-1, "int32"), g.variable(0, "int32")
    size = T.int32(shape.pairs)
    with g.serial(a.m) as s:
        here = g.let((a.seqs[s, 2] * T.int32(op.heads) + (size - T.int32(1))) // size)
        with g.when(T.And(left[0] >= T.int32(0), left[0] < here)):
            g.put(owner, s)
            g.put(inside, left[0])
        g.put(left, left[0] - here)
    with g.when(owner[0] >= T.int32(0)):
        s = g.let(owner[0])
        slot, row, rows, position = (g.variable(a.seqs[s, i]) for i in range(4))
        start = g.variable(inside[0] * size)
        pairs = g.variable(T.min(rows[0] * T.int32(op.heads) - start[0], size))
        with g.when(tid < size):
            pair = g.variable(start[0] + T.min(tid, pairs[0] - T.int32(1)))
            own = g.let(pair[0] // T.int32(op.heads))
            g.store(memory.rows, row[0] + own, tid)
            g.store(memory.heads, pair[0] % T.int32(op.heads), tid)
            g.store(memory.seen, position[0] + own + T.int32(1), tid)
        g.barrier()
        few = g.variable(memory.seen[T.int32(0)])
        many = g.variable(memory.seen[T.int32(shape.pairs - 1)])
        first = g.variable(row[0] * T.int32(op.heads) + start[0])
        yield Tile(op, a, shape, tid, slot[0], first[0], pairs[0], few[0], many[0], memory)
