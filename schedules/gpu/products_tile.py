"""A workgroup's share of a product with many rows of x: which rows, and how they are staged.

A workgroup goes along k in steps of 32 and stages that much of its rows of x and of the weight in
shared memory, decoded, in the number format of the product that asks (`Park`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK, GROUP, Weights, e2m1, high_half, low_half

Expr = Any
Source = Any  # where a row of x is, as the operator says it
Lead = Callable[[Expr], Sequence[Expr]]  # leading indices of a block of 16 rows
Finish = Callable[[Expr, Expr, Expr], None]  # (row of the tile, weight row, value)
Product = Callable[["Tile", Finish], None]  # finish() for every result of a tile
# (staged row, i, value): park elements 4 i ... 4 i + 3 of a step, float32; weights follow x
Park = Callable[[Expr, Expr, Expr], None]

STEP = 32  # elements of k in a step: one group of MXFP4
FOURS = STEP // 4
THREADS = 128


@dataclass(frozen=True)
class Tile:
    """One workgroup's work: `height` rows of x times `width` weight rows.

    height: a multiple of 16. width: 32 or 64. lead: indices of a block. blocks: how many there
    are. first: the first of this workgroup. source: where row i of the tile is in x, for every i.
    x: `lanes` elements of such a row.
    """

    weights: Weights
    height: int
    width: int
    lead: Lead
    blocks: int
    first: Expr
    source: Callable[[Expr], Source]
    x: Callable[[Source, Expr, int], Expr]
    thread: Expr

    def block(self, i: Expr) -> Expr:
        """Block i of this workgroup; past the end it is the last again, and never stored."""
        return T.min(self.first + i, T.int32(self.blocks - 1))


def stager(tile: Tile, park: Park) -> Callable[[Expr], None]:
    """A function that stages the tile's rows of x and of the weight for one step of k.

    A thread stages the same four columns of rows i, i + 16, ... of x in each step; those past the
    end of k are zero.
    """
    four = g.let(tile.thread % T.int32(FOURS))
    first = g.let(tile.thread // T.int32(FOURS))
    each = THREADS // FOURS
    rows = [first + T.int32(i) for i in range(0, tile.height, each)]
    sources = [tile.source(row) for row in rows]

    def stage(step: Expr) -> None:
        k = g.let(step * T.int32(STEP) + four * T.int32(4))
        for row, source in zip(rows, sources, strict=True):
            park(row, four, _four(tile, source, k))
        _STAGE[tile.weights.fmt](tile, step, park)

    return stage


def _four(tile: Tile, source: Source, k: Expr) -> Expr:
    """x[source, k : k + 4]; zero past the end of k."""
    end = tile.weights.k
    if end % STEP == 0:
        return tile.x(source, k, 4)
    cell = g.variable(g.splat(0.0, 4))
    if end % 4 == 0:
        with g.when(k < T.int32(end)):
            g.store(cell, tile.x(source, k, 4), 0, lanes=4)
    else:
        for j in range(4):
            with g.when(k + T.int32(j) < T.int32(end)):
                g.put(cell, tile.x(source, k + T.int32(j), 1), j)
    return g.load(cell, 0, lanes=4)


def _stage_mxfp4(tile: Tile, step: Expr, park: Park) -> None:
    """A thread stages one or two of the four words of a group of one row."""
    words = 4 * tile.width // THREADS
    row = g.let(tile.thread % T.int32(tile.width))
    part = g.let(tile.thread // T.int32(tile.width))
    lead = tile.lead(g.let(tile.block(row // T.int32(BLOCK))))
    lane = g.let(row % T.int32(BLOCK))
    scale = tile.weights.scale_of(lead, step, lane)
    for i in range(words):
        at = g.let(part * T.int32(words) + T.int32(i))
        index = step * T.int32(GROUP // 8) + at
        word = T.Bind(g.load(tile.weights.data, *tile.weights.lead(lead), index, lane))
        values = [v * scale for v in e2m1(word)]
        four = g.let(at * T.int32(2))
        park(row + T.int32(tile.height), four, vector(values[:4]))
        park(row + T.int32(tile.height), four + T.int32(1), vector(values[4:]))


def _stage_plain(tile: Tile, step: Expr, park: Park, lanes: int) -> None:
    """A thread stages four k of a few rows: 8 bytes of bfloat16 or 16 of float32 each."""
    needed = tile.width // BLOCK * 4 * FOURS
    if needed == THREADS:
        return _stage_columns(tile, step, park, lanes)
    with g.when(tile.thread < T.int32(needed)):
        _stage_columns(tile, step, park, lanes)


def _stage_columns(tile: Tile, step: Expr, park: Park, lanes: int) -> None:
    w = tile.weights
    part = g.let(tile.thread % T.int32(4))
    four = g.let(tile.thread // T.int32(4) % T.int32(FOURS))
    block = g.let(tile.thread // T.int32(4 * FOURS))
    lead = w.lead(tile.lead(g.let(tile.block(block))))
    columns: list[list[Expr]] = []
    for j in range(4):
        k = g.let(step * T.int32(STEP) + four * T.int32(4) + T.int32(j))
        # past the end of k the staged x is zero, any weight will do
        k = k if w.k % STEP == 0 else g.let(T.min(k, T.int32(w.k - 1)))
        words = T.Bind(g.load(w.data, *lead, k, part * T.int32(lanes), lanes=lanes))
        column = [g.lane(words, i) for i in range(lanes)]
        if w.fmt == "bfloat16":
            column = [low_half(c) for c in column] + [high_half(c) for c in column]
        columns.append(column)
    first = g.let(block * T.int32(BLOCK) + part * T.int32(lanes) + T.int32(tile.height))
    for i in range(len(columns[0])):
        row = first + T.int32(i % lanes + i // lanes * 8)
        park(row, four, vector([c[i] for c in columns]))


def vector(values: Sequence[Expr]) -> Expr:
    """Scalars as one vector."""
    return T.Shuffle(list(values), list(range(len(values))))


_STAGE: dict[str, Callable[[Tile, Expr, Park], None]] = {
    "mxfp4": _stage_mxfp4,
    "bfloat16": lambda tile, step, park: _stage_plain(tile, step, park, 2),
    "float32": lambda tile, step, park: _stage_plain(tile, step, park, 4),
}
