"""Weighted sums of latents on CUDA's tensor cores, for one tile of a latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.cores import do, pointer
from k3tvm.schedules.gpu.mla_cores import (
    BAD,
    COLUMNS,
    GROUPS,
    PAIRS,
    SLAB,
    THREADS,
    TILES,
    Place,
    column,
    cores_of,
    multiply,
    park,
    place_of,
    shares_of,
    zero,
)
from k3tvm.schedules.gpu.mla_tile import SCORES, Tile
from k3tvm.schedules.gpu.products_split import LANES, RUN, RUN_WORDS, STEP, STEP_WORDS

Expr = Any

COUNT = TILES * COLUMNS * 4  # sums of a thread in a slab


@dataclass(frozen=True)
class Sums:
    """This thread's part of the weighted sums, slab by slab of 64 columns, from `first` on."""

    t: Tile
    at: Place
    first: Expr
    cells: Any

    @property
    def slabs(self) -> int:
        """How many slabs a workgroup has."""
        return self.t.op.rank // SLAB // shares_of(self.t.op)


def new_sums(t: Tile, share: Expr) -> Sums:
    """All zero, of one share of the columns."""
    slabs = t.op.rank // SLAB // shares_of(t.op)
    cells = g.local(slabs * COUNT)
    zero(cells, slabs * COUNT)
    return Sums(t, place_of(t.tid), g.let(share * T.int32(slabs * SLAB)), cells)


def rescale(sums: Sums) -> None:
    """sums = sums * factors[pair]."""
    for i in range(TILES):
        for upper in range(2):
            factor = g.let(sums.t.memory.factors[_pair(sums, i, upper)])
            for slab in range(sums.slabs):
                for n in range(COLUMNS):
                    for odd in range(2):
                        at = _cell(slab, i, n, upper, odd)
                        g.put(sums.cells, sums.cells[T.int32(at)] * factor, at)


def add_values(sums: Sums, start: Expr) -> None:
    """sums += shares . cache rows of keys start + j, j < KEYS.

    What a pair may not see has the share zero, so values that are not finite count as zero: pairs
    that do see them have NaN from the scores.
    """
    t, c = sums.t, cores_of(sums.t.op.act)
    _take_shares_apart(t, c.p)
    base = c.p * GROUPS * PAIRS
    col, lane = g.let(t.tid % T.int32(SLAB)), g.let(t.tid // T.int32(SLAB))
    own = g.let(T.int32(base * STEP_WORDS) + _word(col, lane))
    rights = []
    for n in range(COLUMNS):
        c_ = g.let(column(sums.at, n))
        rights.append(g.let(T.int32(base * STEP_WORDS) + _word(c_, sums.at.t)))
    # as many as have keys: a number that is not known keeps compilers from unrolling
    groups = T.min((t.many - start + T.int32(STEP - 1)) // T.int32(STEP), T.int32(GROUPS))
    with g.serial(g.let(groups)) as group:
        first = g.let(start + group * T.int32(STEP))
        _copy_values(sums, first, 0)
        for slab in range(sums.slabs):
            do("copies_done", T.int32(0))
            # all have copied their values, and are done with the slab before
            g.barrier()
            park(t, _values(t, col, lane), c.k, own, SLAB)
            g.barrier()
            if slab + 1 < sums.slabs:
                _copy_values(sums, first, slab + 1)
            left = (c.p, g.let(group * T.int32(PAIRS * STEP_WORDS)), GROUPS * PAIRS)
            multiply(t, sums.at, left, (c.k, rights, SLAB), sums.cells, slab * COUNT)


def _take_shares_apart(t: Tile, parts: int) -> None:
    """Scores become parts in their place: [part][group of keys][pair][32 keys]."""
    pair, lane = g.let(t.tid // T.int32(LANES)), g.let(t.tid % T.int32(LANES))
    shares = []  # barriers have come since the softmax wrote them
    for group in range(GROUPS):
        at = pair * T.int32(SCORES) + lane * T.int32(RUN) + T.int32(group * STEP)
        fours = [g.load(t.memory.scores, at + T.int32(4 * i), lanes=4) for i in range(2)]
        fours = [T.Bind(four) for four in fours]
        shares.append([g.let(g.lane(fours[i // 4], i % 4)) for i in range(RUN)])
    g.barrier()
    for group in range(GROUPS):
        row = T.int32(group * PAIRS) + pair
        word = g.let(row * T.int32(STEP_WORDS) + lane * T.int32(RUN_WORDS))
        park(t, shares[group], parts, word, GROUPS * PAIRS)


def _copy_values(sums: Sums, first: Expr, slab: int) -> None:
    """Begin to copy a slab of a group of keys: [32 keys][64 columns], as the cache has them."""
    t = sums.t
    sharers = THREADS // STEP
    key, lane = g.let(t.tid // T.int32(sharers)), g.let(t.tid % T.int32(sharers))
    row = g.let(T.min(first + key, t.many - T.int32(1)))
    for i in range(0, SLAB, sharers * 4):
        col = g.let(lane * T.int32(4) + T.int32(i))
        to = g.let(T.int32(t.memory.raw) + key * T.int32(SLAB) + col)
        source = t.a.cache[g.wide(t.slot), row, sums.first + T.int32(slab * SLAB) + col]
        do("copy16", pointer(t.memory.pool, to), T.address_of(source))
    do("copies_sent")


def _values(t: Tile, col: Expr, lane: Expr) -> list[Expr]:
    """Eight keys of a column of a slab."""
    first = g.let(T.int32(t.memory.raw) + lane * T.int32(RUN * SLAB) + col)
    return [_finite(g.let(t.memory.pool[first + T.int32(i * SLAB)])) for i in range(RUN)]


def _word(col: Expr, lane: Expr) -> Expr:
    """Where a lane's run of a column is: neighbouring columns turn, to be in different banks."""
    turned = T.bitwise_xor(lane, T.bitwise_and(col >> T.int32(1), T.int32(3)))
    return col * T.int32(STEP_WORDS) + turned * T.int32(RUN_WORDS)


def _finite(value: Expr) -> Expr:
    exponent = T.bitwise_and(g.bits(value, "uint32"), T.uint32(BAD))
    bad = g.cast(exponent, "int32") == T.int32(BAD)
    return g.let(T.Select(bad, g.floats(0.0), value))


def _pair(sums: Sums, i: int, upper: int) -> Expr:
    return g.let(sums.at.pair + T.int32(16 * i + 8 * upper) + sums.at.pick)


def _cell(slab: int, i: int, n: int, upper: int, odd: int) -> int:
    return slab * COUNT + (i * COLUMNS + n) * 4 + 2 * upper + odd


def each_sum(sums: Sums, emit: Any) -> None:
    """`emit(pair, column, [cell, cell])` for every two neighbouring sums of the result."""
    for i in range(TILES):
        for upper in range(2):
            pair = _pair(sums, i, upper)
            with g.when(pair < sums.t.pairs):
                for slab in range(sums.slabs):
                    for n in range(COLUMNS):
                        first = sums.first + T.int32(slab * SLAB + 8 * n) + sums.at.column
                        at = g.let(first + sums.at.t * T.int32(2))
                        cells = [sums.cells[T.int32(_cell(slab, i, n, upper, o))] for o in range(2)]
                        emit(pair, at, cells)
