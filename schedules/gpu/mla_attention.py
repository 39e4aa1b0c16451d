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
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu import mla_cores, mla_cores_sums
from k3tvm.schedules.gpu.mla_parts import (
    GROUPS,
    add_parts,
    joined_softmax,
    keep_softmax,
    keep_sums,
    room_for,
)
from k3tvm.schedules.gpu.mla_steps import (
    Softmax,
    absorb,
    new_softmax,
    round_shares,
    score_keys,
    shared_pair,
)
from k3tvm.schedules.gpu.mla_sums import Sums, add_values, each_sum, new_sums, rescale
from k3tvm.schedules.gpu.mla_tile import KEYS, Shape, Tile, shape_of, tile_of, tiles_of
from k3tvm.schedules.profile import GpuProfile

PART = 2 * KEYS  # keys of a part at least


def attention(op: MlaAttention, p: GpuProfile, a: SimpleNamespace) -> None:
    """Many tiles: a workgroup each. Few: a workgroup per part of each tile's keys."""
    shape = shape_of(op, p)
    tiles = tiles_of(op, shape, a)
    if mla_cores.able(op, p):
        many = mla_cores.tiles_of(op, a)
        with T.If(many >= T.int32(mla_cores.BUSY)):
            with T.Then():
                _whole_on_cores(op, a, many)
            with T.Else():
                _split(op, shape, a, tiles)
        return
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


def _whole_on_cores(op: MlaAttention, a: SimpleNamespace, tiles: Any) -> None:
    prepared = mla_cores.queries(op, a)
    shares = T.int32(mla_cores.shares_of(op))
    with g.groups(tiles * shares, mla_cores.THREADS) as (group, tid):
        index, memory = tiles - T.int32(1) - group // shares, mla_cores.memory_of(op)
        with tile_of(op, mla_cores.SHAPE, a, index, tid, memory) as t:
            softmax, sums = new_softmax(), mla_cores_sums.new_sums(t, group % shares)
            if op.act == "float32":
                with _blocks(T.int32(0), t.many) as block:
                    first = g.let(block * T.int32(KEYS))
                    mla_cores.score_keys(t, prepared, first)
                    absorb(t, softmax, shares=True)
                    mla_cores_sums.rescale(sums)
                    mla_cores_sums.add_values(sums, first)
            else:
                with _blocks(T.int32(0), t.many) as block:
                    mla_cores.score_keys(t, prepared, g.let(block * T.int32(KEYS)))
                    absorb(t, softmax, shares=False)
                with _blocks(T.int32(0), t.many) as block:
                    first = g.let(block * T.int32(KEYS))
                    mla_cores.score_keys(t, prepared, first)
                    round_shares(t, softmax)
                    mla_cores_sums.add_values(sums, first)
            _write_out(t, softmax, sums, mla_cores_sums.each_sum)


def _split(op: MlaAttention, shape: Shape, a: SimpleNamespace, tiles: Any) -> None:
    parts = T.max(T.int32(GROUPS) // tiles, T.int32(1))
    pairs = a.n * T.int32(op.heads)
    room = room_for(op, parts, pairs)
    if op.act == "float32":
        _over_parts(op, shape, a, tiles, parts, room, _attend_part)
    else:
        _over_parts(op, shape, a, tiles, parts, room, _gather_part, workgroups=2)
        _over_parts(op, shape, a, tiles, parts, room, _weigh_part, again=True)
    add_parts(op, shape, a, pairs, room)


def _over_parts(
    op: MlaAttention,
    shape: Shape,
    a: SimpleNamespace,
    tiles: Any,
    parts: Any,
    room: SimpleNamespace,
    body: Any,
    again: bool = False,
    workgroups: int = 1,
) -> None:
    """`body(tile, part, first key, stop, room)` in a workgroup per part that has keys.

    The first launch notes how many parts there are. One that comes `again` reads that note in every
    workgroup and must not write it.
    """
    with g.groups(tiles * parts, shape.threads) as (group, tid), g.resident(workgroups):
        # neighbouring workgroups read the same keys
        part = g.let(group // tiles)
        with tile_of(op, shape, a, group % tiles, tid) as t:
            length = g.variable(
                T.max((t.many + parts - T.int32(1)) // parts + T.int32(KEYS - 1), T.int32(PART))
                // T.int32(KEYS)
                * T.int32(KEYS)
            )
            start = g.variable(part * length[0])
            if not again:
                with g.when(T.And(part == T.int32(0), tid < t.pairs)):
                    used = (t.many + length[0] - T.int32(1)) // length[0]
                    g.store(room.used, used, t.first + tid)
            with g.when(start[0] < t.many):
                stop = g.variable(T.min(start[0] + length[0], t.many))
                body(t, part, start[0], stop[0], room)


def _attend_part(t: Tile, part: Any, start: Any, stop: Any, room: SimpleNamespace) -> None:
    softmax, sums = new_softmax(), new_sums(t)
    _attend(t, softmax, sums, start, stop)
    keep_softmax(t, part, softmax, room)
    keep_sums(t, part, sums, room)


def _gather_part(t: Tile, part: Any, start: Any, stop: Any, room: SimpleNamespace) -> None:
    softmax = new_softmax()
    _gather(t, softmax, start, stop)
    keep_softmax(t, part, softmax, room)


def _weigh_part(t: Tile, part: Any, start: Any, stop: Any, room: SimpleNamespace) -> None:
    sums = new_sums(t)
    _weigh(t, joined_softmax(t, room), sums, start, stop)
    keep_sums(t, part, sums, room)


def _blocks(start: Any, stop: Any) -> Any:
    return g.serial((stop - start + T.int32(KEYS - 1)) // T.int32(KEYS))


def _attend(t: Tile, softmax: Softmax, sums: Sums, start: Any, stop: Any) -> None:
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


def _weigh(t: Tile, softmax: Softmax, sums: Sums, start: Any, stop: Any) -> None:
    """The sum under a finished softmax."""
    with _blocks(start, stop) as block:
        first = g.let(start + block * T.int32(KEYS))
        score_keys(t, first)
        round_shares(t, softmax)
        add_values(sums, first, g.let(T.min(stop - first, T.int32(KEYS))))


def _write_out(t: Tile, softmax: Softmax, sums: Any, each: Any = each_sum) -> None:
    """out = sums / total of the softmax, unless the shares were divided already."""
    lanes = t.shape.lanes
    if t.op.act == "float32":
        pair, lane = shared_pair(t)
        g.barrier()  # all have rescaled their sums
        with g.when(lane == T.int32(0)):
            g.store(t.memory.factors, softmax.total[0], pair)
        g.barrier()

    def write(pair: Any, column: Any, cell: Any) -> None:
        at = t.memory.heads[pair] * T.int32(t.op.rank) + column
        row = g.variable(g.splat(0.0, lanes))
        for i in range(lanes):
            value = cell[i]
            if t.op.act == "float32":
                value = value / t.memory.factors[pair]
            g.put(row, g.rounded(t.op.act, g.let(value)), i)
        g.store(t.a.out, g.load(row, 0, lanes=lanes), t.memory.rows[pair], at, lanes=lanes)

    each(sums, write)
