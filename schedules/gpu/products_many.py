"""Products of a tile of weight rows with a tile of rows of x, both staged in shared memory.

A workgroup goes along k in steps of 32: stage both tiles as float32, multiply, repeat; then the
epilogue. Every result is a sum over the steps of sums in the order of k, so it depends neither on
the size of the tile nor on the other rows in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK, GROUP, Weights, e2m1, high_half, low_half
from k3tvm.schedules.profile import GpuProfile

Expr = Any
Source = Any  # where a row of x is, as the operator says it
Lead = Callable[[Expr], Sequence[Expr]]  # leading indices of a block of 16 rows
Finish = Callable[[Expr, Expr, Expr], None]  # (row of the tile, weight row, value)

STEP = 32  # elements of k in a step: one group of MXFP4
FOURS = STEP // 4
PITCH = FOURS + 1  # vectors of four per staged row: neighbouring rows lie in different banks
ACROSS, DOWN = 16, 8  # threads along the weight rows and along the rows of x
THREADS = ACROSS * DOWN


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

    @property
    def rows(self) -> int:
        """Rows of x of a thread: its number, + 8, ..."""
        return self.height // DOWN

    @property
    def columns(self) -> int:
        """Weight rows of a thread: its number, + 16, ..."""
        return self.width // ACROSS

    def block(self, i: Expr) -> Expr:
        """Block i of this workgroup; past the end it is the last again, and never stored."""
        return T.min(self.first + i, T.int32(self.blocks - 1))


def fits(p: GpuProfile, height: int, width: int) -> bool:
    """Whether a device has the threads and the shared memory for tiles of this size."""
    return p.threads >= THREADS and p.shared_bytes >= (height + width) * PITCH * 16


def matmul(tile: Tile, finish: Finish) -> None:
    """finish(row of the tile, weight row, sum over k of W[weight row, k] * x[row, k]).

    Shared memory holds the staged rows of x, then those of the weight, four k in a vector.
    """
    pool = g.shared((tile.height + tile.width) * PITCH, "float32x4")
    count = tile.rows * tile.columns
    total, part = g.local(count), g.local(count)
    _fill(total, count)
    across = g.let(tile.thread % T.int32(ACROSS))
    down = g.let(tile.thread // T.int32(ACROSS))
    stage_x = _stager_of_x(tile, pool)
    with g.serial(-(-tile.weights.k // STEP)) as step:
        stage_x(step)
        _STAGE[tile.weights.fmt](tile, step, pool)
        g.barrier()
        _fill(part, count)
        _multiply(tile, pool, part, across, down)
        for i in range(count):
            g.put(total, total[T.int32(i)] + part[T.int32(i)], i)
        g.barrier()
    _epilogue(tile, pool, total, across, down, finish)


def _epilogue(tile: Tile, pool: Any, total: Any, across: Expr, down: Expr, finish: Finish) -> None:
    """finish() for every result; a thread parks its own where a loop can index them."""
    mine = g.let(tile.thread * T.int32(tile.rows))
    unused = [g.floats(0.0)] * (4 - tile.columns)
    for i in range(tile.rows):
        values = [total[T.int32(i * tile.columns + j)] for j in range(tile.columns)]
        g.store(pool, vector(values + unused), mine + T.int32(i))
    with g.serial(tile.rows) as i:
        four = T.Bind(pool[mine + i])
        row = g.let(down + i * T.int32(DOWN))
        for j in range(tile.columns):
            column = tile.first * T.int32(BLOCK) + T.int32(j * ACROSS) + across
            finish(row, g.let(column), g.let(g.lane(four, j)))


def _fill(cells: Any, count: int) -> None:
    for i in range(count):
        g.put(cells, g.floats(0.0), i)


def _multiply(tile: Tile, pool: Any, part: Any, across: Expr, down: Expr) -> None:
    """part += the staged tiles' product."""
    with g.serial(FOURS) as four:
        left = [
            T.Bind(pool[(down + T.int32(i * DOWN)) * T.int32(PITCH) + four])
            for i in range(tile.rows)
        ]
        for j in range(tile.columns):
            row = T.int32(tile.height + j * ACROSS) + across
            right = T.Bind(pool[row * T.int32(PITCH) + four])
            for i, x in enumerate(left):
                at = i * tile.columns + j
                value = part[T.int32(at)]
                for k in range(4):
                    value = value + g.lane(x, k) * g.lane(right, k)
                g.put(part, value, at)


def _stager_of_x(tile: Tile, pool: Any) -> Callable[[Expr], None]:
    """A function that stages the tile's rows of x for one step of k; columns past k are zero.

    A thread stages the same four columns of rows i, i + 16, ... in each step.
    """
    four = g.let(tile.thread % T.int32(FOURS))
    first = g.let(tile.thread // T.int32(FOURS))
    each = THREADS // FOURS
    rows = [first + T.int32(i) for i in range(0, tile.height, each)]
    sources = [tile.source(row) for row in rows]

    def stage(step: Expr) -> None:
        k = g.let(step * T.int32(STEP) + four * T.int32(4))
        for row, source in zip(rows, sources, strict=True):
            g.store(pool, _four(tile, source, k), row * T.int32(PITCH) + four)

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


def _stage_mxfp4(tile: Tile, step: Expr, pool: Any) -> None:
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
        place = g.let((row + T.int32(tile.height)) * T.int32(PITCH) + at * T.int32(2))
        g.store(pool, vector(values[:4]), place)
        g.store(pool, vector(values[4:]), place + T.int32(1))


def _stage_plain(tile: Tile, step: Expr, pool: Any, lanes: int) -> None:
    """A thread stages four k of a few rows: 8 bytes of bfloat16 or 16 of float32 each."""
    needed = tile.width // BLOCK * 4 * FOURS
    if needed == THREADS:
        return _stage_columns(tile, step, pool, lanes)
    with g.when(tile.thread < T.int32(needed)):
        _stage_columns(tile, step, pool, lanes)


def _stage_columns(tile: Tile, step: Expr, pool: Any, lanes: int) -> None:
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
        g.store(pool, vector([c[i] for c in columns]), row * T.int32(PITCH) + four)


def vector(values: Sequence[Expr]) -> Expr:
    """Scalars as one vector."""
    return T.Shuffle(list(values), list(range(len(values))))


_STAGE: dict[str, Callable[[Tile, Expr, Any], None]] = {
    "mxfp4": _stage_mxfp4,
    "bfloat16": lambda tile, step, pool: _stage_plain(tile, step, pool, 2),
    "float32": lambda tile, step, pool: _stage_plain(tile, step, pool, 4),
}
