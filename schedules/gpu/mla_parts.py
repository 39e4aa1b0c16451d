"""What is kept of each part of the keys of latent attention on a GPU, and how parts are added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.mla_steps import LOWEST, Softmax, across, shared_pair
from k3tvm.schedules.gpu.mla_sums import Sums, each_sum
from k3tvm.schedules.gpu.mla_tile import Shape, Tile

GROUPS = 512  # workgroups that keep a large device busy: fewer tiles are split into parts
BEST, TOTAL = 0, 1


def room_for(op: MlaAttention, parts: Any, pairs: Any) -> SimpleNamespace:
    """Device memory between the launches: per part and pair its sums and softmax.

    used: how many parts of each pair have keys.
    """
    return SimpleNamespace(
        sums=g.workspace((parts, pairs, op.rank)),
        softmaxes=g.workspace((parts, pairs, 2)),
        used=g.workspace((pairs,), "int32"),
    )


def keep_softmax(t: Tile, part: Any, softmax: Softmax, room: SimpleNamespace) -> None:
    """Store the softmax of a part, of every pair of the tile."""
    pair, lane = shared_pair(t)
    with g.when(T.And(lane == T.int32(0), pair < t.pairs)):
        g.store(room.softmaxes, softmax.best[0], part, t.first + pair, BEST)
        g.store(room.softmaxes, softmax.total[0], part, t.first + pair, TOTAL)


def keep_sums(t: Tile, part: Any, sums: Sums, room: SimpleNamespace) -> None:
    """Store the weighted sums of a part."""
    lanes = t.shape.lanes

    def keep(pair: Any, column: Any, cell: Any) -> None:
        value = g.load(cell, 0, lanes=lanes)
        g.store(room.sums, value, part, t.first + pair, column, lanes=lanes)

    each_sum(sums, keep)


def joined_softmax(t: Tile, room: SimpleNamespace) -> Softmax:
    """The softmax over all parts, of the pair that this thread shares."""
    place, lane = shared_pair(t)
    pair = g.variable(t.first + T.min(place, t.pairs - T.int32(1)))
    used = g.let(room.used[pair[0]])
    best, total = g.variable(LOWEST), g.variable(0.0)
    with g.strided(lane, used, t.shape.sharers) as part:
        g.put(best, T.max(best[0], room.softmaxes[part, pair[0], T.int32(BEST)]))
    g.put(best, across(t, best[0], T.max))
    with g.strided(lane, used, t.shape.sharers) as part:
        grow = f.exp(room.softmaxes[part, pair[0], T.int32(BEST)] - best[0])
        g.put(total, total[0] + room.softmaxes[part, pair[0], T.int32(TOTAL)] * grow)
    g.put(total, across(t, total[0], lambda x, y: x + y))
    return Softmax(best, total)


def add_parts(
    op: MlaAttention, shape: Shape, a: SimpleNamespace, pairs: Any, room: SimpleNamespace
) -> None:
    """out = the parts of each pair, in order, each under the maximum of all."""
    lanes = shape.lanes
    vectors = op.rank // lanes
    threads = 64 if vectors <= 64 else 128
    with g.groups(pairs, threads) as (pair, tid):
        factors, maxima = g.shared(GROUPS), g.shared(threads)
        used = g.let(room.used[pair])
        exact = op.act != "float32"
        if not exact:
            _part_factors(pair, used, tid, threads, room, factors, maxima)
        row, head = g.let(pair // T.int32(op.heads)), g.let(pair % T.int32(op.heads))
        with g.strided(tid, vectors, threads) as i:
            column = g.let(i * T.int32(lanes))
            total = g.variable(g.splat(0.0, lanes))
            with g.serial(used) as part:
                value = g.load(room.sums, part, pair, column, lanes=lanes)
                if not exact:
                    value = value * g.splat(g.let(factors[part]), lanes)
                g.store(total, g.load(total, 0, lanes=lanes) + value, 0, lanes=lanes)
            for k in range(lanes):
                g.put(total, g.rounded(op.act, g.let(total[k])), k)
            at = head * T.int32(op.rank) + column
            g.store(a.out, g.load(total, 0, lanes=lanes), row, at, lanes=lanes)


def _part_factors(
    pair: Any, used: Any, tid: Any, threads: int, room: SimpleNamespace, factors: Any, partial: Any
) -> None:
    """factors[part] = exp(maximum of the part - maximum of all) / total of all."""
    best, total = g.variable(LOWEST), g.variable(0.0)
    with g.strided(tid, used, threads) as part:
        g.put(best, T.max(best[0], room.softmaxes[part, pair, T.int32(BEST)]))
    g.store(partial, best[0], tid)
    g.put(best, g.max_of(partial, tid, threads))
    with g.strided(tid, used, threads) as part:
        grow = f.exp(room.softmaxes[part, pair, T.int32(BEST)] - best[0])
        g.store(factors, grow, part)
        g.put(total, total[0] + room.softmaxes[part, pair, T.int32(TOTAL)] * grow)
    g.store(partial, total[0], tid)
    g.put(total, g.sum_of(partial, tid, threads))
    with g.strided(tid, used, threads) as part:
        g.store(factors, factors[part] / total[0], part)
    g.barrier()
