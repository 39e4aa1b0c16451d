"""Scores of a block of keys and their softmax, for one tile of a latent attention on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.mla_tile import DEPTH, KEY_LANES, KEYS, PAD, SCORES, Tile

LOWEST = -3.0e38  # below every score, yet finite: exp(LOWEST - LOWEST) is 1, not NaN
ROW = DEPTH + PAD


@dataclass(frozen=True)
class Softmax:
    """Of the pair that this thread shares: the maximum so far, the sum of exp(score - maximum)."""

    best: Any
    total: Any


def new_softmax() -> Softmax:
    """A softmax that has seen nothing."""
    return Softmax(g.variable(LOWEST), g.variable(0.0))


def score_keys(t: Tile, start: Any) -> None:
    """scores[pair, j] of keys start + j, j < KEYS; -infinity where the pair may not look.

    Places after the last key that some pair may see repeat that one, so that nothing beyond it is
    read.
    """
    pairs, keys = t.shape.score_pairs, KEYS // KEY_LANES
    sums = [[g.variable(g.splat(0.0, 4)) for _ in range(keys)] for _ in range(pairs)]
    group, lane = g.let(t.tid // T.int32(KEY_LANES)), g.let(t.tid % T.int32(KEY_LANES))
    with g.serial(-(-(t.op.rank + t.op.rope) // DEPTH)) as slab:
        g.barrier()
        _load_slabs(t, start, slab)
        g.barrier()
        with g.serial(DEPTH // 4) as d:
            at = g.let(d * T.int32(4))
            first = g.let(group * T.int32(pairs))
            q = [_slab_row(t.memory.query, first + T.int32(i), at) for i in range(pairs)]
            for j in range(keys):
                k = _slab_row(t.memory.key, lane + T.int32(KEY_LANES * j), at)
                for i in range(pairs):
                    g.store(sums[i][j], g.load(sums[i][j], 0, lanes=4) + q[i] * k, 0, lanes=4)
    for i in range(pairs):
        pair = g.let(group * T.int32(pairs) + T.int32(i))
        seen = g.let(t.memory.seen[pair])
        for j in range(keys):
            key = g.let(lane + T.int32(KEY_LANES * j))
            one = sums[i][j]
            score = g.let(((one[0] + one[1]) + (one[2] + one[3])) * g.floats(t.op.scale))
            value = T.Select(start + key < seen, score, g.floats(float("-inf")))
            g.store(t.memory.scores, value, pair * T.int32(SCORES) + key)
    g.barrier()


def _slab_row(slab: Any, row: Any, at: Any) -> Any:
    return g.let(g.load(slab, row * T.int32(ROW) + at, lanes=4))


def _load_slabs(t: Tile, start: Any, slab: Any) -> None:
    """Columns slab * DEPTH ... of the keys and of the queries; zeros after the last column."""
    lanes = t.shape.query_lanes
    per_row = DEPTH // lanes

    def fetch(i: Any, read: Callable[[Any, Any, Any], None]) -> tuple[Any, Any]:
        """(value, place in shared memory) of vector i."""
        row, at = g.let(i // T.int32(per_row)), g.let(i % T.int32(per_row) * T.int32(lanes))
        column = g.let(slab * T.int32(DEPTH) + at)
        cell = g.variable(g.splat(0.0, lanes))
        if (t.op.rank + t.op.rope) % DEPTH == 0:
            read(row, column, cell)
        else:
            with g.when(column < T.int32(t.op.rank + t.op.rope)):
                read(row, column, cell)
        return cell, row * T.int32(ROW) + at

    def key(row: Any, column: Any, cell: Any) -> None:
        place = g.let(T.min(start + row, t.many - T.int32(1)))
        value = g.load(t.a.cache, g.wide(t.slot), place, column, lanes=lanes)
        g.store(cell, value, 0, lanes=lanes)

    def query(pair: Any, column: Any, cell: Any) -> None:
        _read_query(t, pair, column, cell)

    slabs = [(t.memory.key, KEYS, key), (t.memory.query, t.shape.pairs, query)]
    if lanes > 1 and t.shape.pairs * per_row % t.shape.threads == 0:
        # all loads are on their way before the first is waited for
        fetched = [
            (buffer, *fetch(t.tid + T.int32(k * t.shape.threads), read))
            for buffer, rows, read in slabs
            for k in range(rows * per_row // t.shape.threads)
        ]
        for buffer, cell, to in fetched:
            g.store(buffer, g.load(cell, 0, lanes=lanes), to, lanes=lanes)
        return
    for buffer, rows, read in slabs:
        with g.strided(t.tid, rows * per_row, t.shape.threads) as i:
            cell, to = fetch(i, read)
            g.store(buffer, g.load(cell, 0, lanes=lanes), to, lanes=lanes)


def _read_query(t: Tile, pair: Any, column: Any, cell: Any) -> None:
    """Columns of a query: the absorbed part, then the rope part."""
    lanes = t.shape.query_lanes
    row, head = g.let(t.memory.rows[pair]), g.let(t.memory.heads[pair])

    def absorbed() -> None:
        at = head * T.int32(t.op.rank) + column
        g.store(cell, g.load(t.a.absorbed, row, at, lanes=lanes), 0, lanes=lanes)

    if not t.op.rope:
        absorbed()
        return
    with T.If(column < T.int32(t.op.rank)):
        with T.Then():
            absorbed()
        with T.Else():
            first = head * T.int32(t.op.q_stride) + T.int32(t.op.q_offset + t.op.nope)
            at = first + (column - T.int32(t.op.rank))
            g.store(cell, g.load(t.a.q, row, at, lanes=lanes), 0, lanes=lanes)


def absorb(t: Tile, softmax: Softmax, shares: bool) -> None:
    """Take the block's scores into the softmax; factors[pair] rescales older sums.

    With `shares` the scores become exp(score - maximum).
    """
    top, total = g.variable(softmax.best[0]), g.variable(0.0)
    with own_scores(t) as at:
        g.put(top, T.max(top[0], t.memory.scores[at]))
    best = g.variable(across(t, top[0], T.max))
    with own_scores(t) as at:
        share = f.exp(t.memory.scores[at] - best[0])
        g.put(total, total[0] + share)
        if shares:
            g.store(t.memory.scores, share, at)
    keep = f.exp(softmax.best[0] - best[0])
    pair, lane = shared_pair(t)
    with g.when(lane == T.int32(0)):
        g.store(t.memory.factors, keep, pair)
    whole = across(t, total[0], lambda x, y: x + y)
    g.put(softmax.total, softmax.total[0] * keep + whole)
    g.put(softmax.best, best[0])


def round_shares(t: Tile, softmax: Softmax) -> None:
    """Scores become probabilities under a finished softmax, rounded to the activation type."""
    with own_scores(t) as at:
        share = g.let(f.exp(t.memory.scores[at] - softmax.best[0]) / softmax.total[0])
        g.store(t.memory.scores, g.rounded(t.op.act, share), at)
    g.barrier()


def shared_pair(t: Tile) -> tuple[Any, Any]:
    """The pair that this thread shares in the softmax, and its number among the sharers."""
    sharers = T.int32(t.shape.sharers)
    return g.let(t.tid // sharers), g.let(t.tid % sharers)


@contextmanager
def own_scores(t: Tile) -> Iterator[Any]:
    """A loop over the places of this thread's share of its pair's scores."""
    pair, lane = shared_pair(t)
    with g.serial(KEYS // t.shape.sharers) as j:
        yield g.let(pair * T.int32(SCORES) + lane + j * T.int32(t.shape.sharers))


def across(t: Tile, value: Any, join: Any) -> Any:
    """`value` of all threads that share a pair, joined; ends with a barrier."""
    g.store(t.memory.partial, value, t.tid)
    g.barrier()
    first = g.let(t.tid // T.int32(t.shape.sharers) * T.int32(t.shape.sharers))
    result = g.variable(t.memory.partial[first])
    for i in range(1, t.shape.sharers):
        g.put(result, join(result[0], t.memory.partial[first + T.int32(i)]))
    g.barrier()
    return g.let(result[0])
