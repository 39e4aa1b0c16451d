"""Absorbed queries and the latent cache into attention outputs: the GPU kernels of `MlaAttention`.

A workgroup takes a tile of (row, head) pairs and walks over the keys in blocks: scores through
shared memory, softmax, weighted sum in registers. Where there are few tiles, the keys of a tile
are split into parts, and a second kernel adds the parts up in order. How many parts there are
depends on the shapes alone; how long they are on the keys that there are.

In 16-bit activations the probabilities are rounded before the sum, so the softmax is finished in a
pass of its own, and the scores are computed again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.mla_steps import (
    LOWEST,
    Softmax,
    absorb,
    across,
    add_values,
    each_sum,
    new_softmax,
    new_sums,
    rescale,
    round_shares,
    score_keys,
    shared_pair,
)
from k3tvm.schedules.gpu.mla_tile import KEYS, Shape, Tile, shape_of, tile_of, tiles_of
from k3tvm.schedules.profile import GpuProfile

GROUPS = 512  # workgroups that keep a large device busy: fewer tiles are split into parts
PART = 256  # keys of a part at least
BEST, TOTAL = 0, 1


def attention(op: MlaAttention, p: GpuProfile, a: SimpleNamespace) -> None:
    """Many tiles: a workgroup each. Few: a workgroup per part of each tile's keys."""
    shape = shape_of(op, p)
    tiles = tiles_of(op, shape, a)
    with T.If(tiles * T.int32(2) > T.int32(GROUPS)):
        with T.Then():
            _whole(op, shape, a, tiles)
        with T.Else():
            _split(op, shape, a, tiles)


def _whole(op: MlaAttention, shape: Shape, a: SimpleNamespace, tiles: Any) -> None:
    with g.groups(tiles, shape.threads) as (group, tid):
        # the longest first: they are the last ones of a prompt
        with tile_of(op, shape, a, tiles - T.int32(1) - group, tid) as t:
            nothing, softmax, sums = T.int32(0), new_softmax(), new_sums(t)
            if op.act == "float32":
                _attend(t, softmax, sums, nothing, t.many)
            else:
                _gather(t, softmax, nothing, t.many)
                _weigh(t, softmax, sums, nothing, t.many)
            _write_out(t, softmax, sums)


def _split(op: MlaAttention, shape: Shape, a: SimpleNamespace, tiles: Any) -> None:
    parts = T.max(T.int32(GROUPS) // tiles, T.int32(1))
    pairs = a.n * T.int32(op.heads)
    sums = g.workspace((parts, pairs, op.rank))
    softmaxes = g.workspace((parts, pairs, 2))
    used = g.workspace((pairs,), "int32")  # parts of each pair that have keys
    room = SimpleNamespace(sums=sums, softmaxes=softmaxes, used=used)
    if op.act == "float32":
        _over_parts(op, shape, a, tiles, parts, room, _attend_part)
    else:
        _over_parts(op, shape, a, tiles, parts, room, _gather_part)
        _over_parts(op, shape, a, tiles, parts, room, _weigh_part)
    _add_parts(op, shape, a, pairs, room)


def _over_parts(
    op: MlaAttention,
    shape: Shape,
    a: SimpleNamespace,
    tiles: Any,
    parts: Any,
    room: SimpleNamespace,
    body: Any,
) -> None:
    """`body(tile, part, first key, stop, room)` in a workgroup per part that has keys."""
    with g.groups(tiles * parts, shape.threads) as (group, tid):
        # neighbouring workgroups read the same keys
        part = g.let(group // tiles)
        with tile_of(op, shape, a, group % tiles, tid) as t:
            length = g.variable(
                T.max((t.many + parts - T.int32(1)) // parts + T.int32(KEYS - 1), T.int32(PART))
                // T.int32(KEYS)
                * T.int32(KEYS)
            )
            start = g.variable(part * length[0])
            with g.when(T.And(part == T.int32(0), tid < t.pairs)):
                used = (t.many + length[0] - T.int32(1)) // length[0]
                g.store(room.used, used, t.first + tid)
            with g.when(start[0] < t.many):
                stop = g.variable(T.min(start[0] + length[0], t.many))
                body(t, part, start[0], stop[0], room)


def _attend_part(t: Tile, part: Any, start: Any, stop: Any, room: SimpleNamespace) -> None:
    softmax, sums = new_softmax(), new_sums(t)
    _attend(t, softmax, sums, start, stop)
    _keep_softmax(t, part, softmax, room)
    _keep_sums(t, part, sums, room)


def _gather_part(t: Tile, part: Any, start: Any, stop: Any, room: SimpleNamespace) -> None:
    softmax = new_softmax()
    _gather(t, softmax, start, stop)
    _keep_softmax(t, part, softmax, room)


def _weigh_part(t: Tile, part: Any, start: Any, stop: Any, room: SimpleNamespace) -> None:
    sums = new_sums(t)
    _weigh(t, _joined_softmax(t, room), sums, start, stop)
    _keep_sums(t, part, sums, room)


def _blocks(start: Any, stop: Any) -> Any:
    return g.serial((stop - start + T.int32(KEYS - 1)) // T.int32(KEYS))


def _attend(t: Tile, softmax: Softmax, sums: Any, start: Any, stop: Any) -> None:
    """float32: one pass over the keys; sums are rescaled when a larger score turns up."""
    with _blocks(start, stop) as block:
        first = g.let(start + block * T.int32(KEYS))
        score_keys(t, first)
        absorb(t, softmax, shares=True)
        rescale(sums)
        add_values(sums, first, g.let(T.min(stop - first, T.int32(KEYS))))


def _gather(t: Tile, softmax: Softmax, start: Any, stop: Any) -> None:
    """The softmax of the keys alone."""
    with _blocks(start, stop) as block:
        score_keys(t, g.let(start + block * T.int32(KEYS)))
        absorb(t, softmax, shares=False)


def _weigh(t: Tile, softmax: Softmax, sums: Any, start: Any, stop: Any) -> None:
    """The sum under a finished softmax."""
    with _blocks(start, stop) as block:
        first = g.let(start + block * T.int32(KEYS))
        score_keys(t, first)
        round_shares(t, softmax)
        add_values(sums, first, g.let(T.min(stop - first, T.int32(KEYS))))


def _write_out(t: Tile, softmax: Softmax, sums: Any) -> None:
    """out = sums / total of the softmax, unless the shares were divided already."""
    lanes = t.shape.lanes
    if t.op.act == "float32":
        pair, lane = shared_pair(t)
        with g.when(lane == T.int32(0)):
            g.store(t.memory.factors, softmax.total[0], pair)
        g.barrier()

    def write(pair: Any, column: Any, cell: Any) -> None:
        at = t.memory.heads[pair] * T.int32(t.op.rank) + column
        for i in range(lanes):
            value = cell[i]
            if t.op.act == "float32":
                value = value / t.memory.factors[pair]
            g.put(cell, g.rounded(t.op.act, g.let(value)), i)
        g.store(t.a.out, g.load(cell, 0, lanes=lanes), t.memory.rows[pair], at, lanes=lanes)

    each_sum(sums, write)


def _keep_softmax(t: Tile, part: Any, softmax: Softmax, room: SimpleNamespace) -> None:
    pair, lane = shared_pair(t)
    with g.when(T.And(lane == T.int32(0), pair < t.pairs)):
        g.store(room.softmaxes, softmax.best[0], part, t.first + pair, BEST)
        g.store(room.softmaxes, softmax.total[0], part, t.first + pair, TOTAL)


def _keep_sums(t: Tile, part: Any, sums: Any, room: SimpleNamespace) -> None:
    lanes = t.shape.lanes

    def keep(pair: Any, column: Any, cell: Any) -> None:
        value = g.load(cell, 0, lanes=lanes)
        g.store(room.sums, value, part, t.first + pair, column, lanes=lanes)

    each_sum(sums, keep)


def _joined_softmax(t: Tile, room: SimpleNamespace) -> Softmax:
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


def _add_parts(
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
