"""Weighted sums of cache rows, in registers, for one tile of a latent attention on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.mla_tile import COLUMN_LANES, SCORES, Tile

UNROLLED = 2  # keys of one turn of the weighted sum; more cost registers that CUDA then spills


@dataclass(frozen=True)
class Sums:
    """This thread's part of the weighted sums: cells[pair][vector of columns]."""

    t: Tile
    cells: list[list[Any]]

    def pair(self, i: int) -> Any:
        """Number in the tile of the thread's pair i."""
        group = self.t.tid // T.int32(COLUMN_LANES)
        return group * T.int32(self.t.shape.sum_pairs) + T.int32(i)

    def column(self, j: int) -> Any:
        """First column of the thread's vector j; from the last column on in unused ones."""
        lanes = self.t.shape.lanes
        lane = self.t.tid % T.int32(COLUMN_LANES)
        return lane * T.int32(lanes) + T.int32(COLUMN_LANES * lanes * j)


def new_sums(t: Tile) -> Sums:
    """All zero."""
    lanes, columns = t.shape.lanes, range(t.shape.columns)
    cells = [[g.variable(g.splat(0.0, lanes)) for _ in columns] for _ in range(t.shape.sum_pairs)]
    return Sums(t, cells)


def rescale(sums: Sums) -> None:
    """sums = sums * factors[pair]."""
    lanes = sums.t.shape.lanes
    for i, row in enumerate(sums.cells):
        factor = g.splat(g.let(sums.t.memory.factors[sums.pair(i)]), lanes)
        for cell in row:
            g.store(cell, g.load(cell, 0, lanes=lanes) * factor, 0, lanes=lanes)


def add_values(sums: Sums, start: Any, keys: Any) -> None:
    """sums += shares . cache rows of keys start + j, j < keys: those that all pairs see in turns.

    What a pair may not see is not multiplied by zero but left out: it may be NaN.
    """
    t = sums.t
    common = g.variable(T.max(T.min(t.few - start, keys), T.int32(0)))
    turns = g.let(common[0] // T.int32(UNROLLED))
    with g.serial(turns) as turn:
        for u in range(UNROLLED):
            _add_key(sums, start, g.let(turn * T.int32(UNROLLED) + T.int32(u)), guarded=False)
    with g.serial_range(turns * T.int32(UNROLLED), keys) as j:
        _add_key(sums, start, j, guarded=True)


def _add_key(sums: Sums, start: Any, j: Any, guarded: bool) -> None:
    t, lanes = sums.t, sums.t.shape.lanes
    last = T.int32(t.op.rank - lanes)
    values = [
        g.let(
            g.load(t.a.cache, g.wide(t.slot), start + j, T.min(sums.column(k), last), lanes=lanes)
        )
        for k in range(t.shape.columns)
    ]
    for i, row in enumerate(sums.cells):
        pair = g.let(sums.pair(i))

        def add(pair: Any = pair, row: list[Any] = row) -> None:
            share = g.splat(g.let(t.memory.scores[pair * T.int32(SCORES) + j]), lanes)
            for value, cell in zip(values, row, strict=True):
                g.store(cell, g.load(cell, 0, lanes=lanes) + share * value, 0, lanes=lanes)

        if guarded:
            with g.when(start + j < t.memory.seen[pair]):
                add()
        else:
            add()


def each_sum(sums: Sums, emit: Any) -> None:
    """`emit(pair, column, cell)` for every sum of the thread that belongs to the result."""
    t = sums.t
    for i, row in enumerate(sums.cells):
        pair = g.let(sums.pair(i))
        with g.when(pair < t.pairs):
            for k, cell in enumerate(row):
                column = g.let(sums.column(k))
                with g.when(column < T.int32(t.op.rank)):
                    emit(pair, column, cell)
