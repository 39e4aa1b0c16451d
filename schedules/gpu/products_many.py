"""Products of a tile of weight rows with a tile of rows of x, both staged in shared memory.

A workgroup goes along k in steps of 32: stage both tiles as float32, multiply, repeat; then the
epilogue. Every result is a sum over the steps of sums in the order of k, so it depends neither on
the size of the tile nor on the other rows in it.
"""

from __future__ import annotations

from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK
from k3tvm.schedules.gpu.products_tile import FOURS, STEP, THREADS, Finish, Tile, stager, vector
from k3tvm.schedules.profile import GpuProfile

Expr = Any

PITCH = FOURS + 1  # vectors of four per staged row: neighbouring rows lie in different banks
ACROSS, DOWN = 16, 8  # threads along the weight rows and along the rows of x


def fits(p: GpuProfile, height: int, width: int) -> bool:
    """Whether a device has the threads and the shared memory for tiles of this size."""
    return p.threads >= THREADS and p.shared_bytes >= (height + width) * PITCH * 16


def matmul(tile: Tile, finish: Finish) -> None:
    """finish(row of the tile, weight row, sum over k of W[weight row, k] * x[row, k]).

    Shared memory holds the staged rows of x, then those of the weight, four k in a vector.
    """
    pool = g.shared((tile.height + tile.width) * PITCH, "float32x4")
    count = _rows(tile) * _columns(tile)
    total, part = g.local(count), g.local(count)
    _fill(total, count)
    across = g.let(tile.thread % T.int32(ACROSS))
    down = g.let(tile.thread // T.int32(ACROSS))

    def park(row: Expr, four: Expr, value: Expr) -> None:
        g.store(pool, value, row * T.int32(PITCH) + four)

    stage = stager(tile, park)
    with g.serial(-(-tile.weights.k // STEP)) as step:
        stage(step)
        g.barrier()
        _fill(part, count)
        _multiply(tile, pool, part, across, down)
        for i in range(count):
            g.put(total, total[T.int32(i)] + part[T.int32(i)], i)
        g.barrier()
    _epilogue(tile, pool, total, across, down, finish)


def _epilogue(tile: Tile, pool: Any, total: Any, across: Expr, down: Expr, finish: Finish) -> None:
    """finish() for every result; a thread parks its own where a loop can index them."""
    mine = g.let(tile.thread * T.int32(_rows(tile)))
    unused = [g.floats(0.0)] * (4 - _columns(tile))
    for i in range(_rows(tile)):
        values = [total[T.int32(i * _columns(tile) + j)] for j in range(_columns(tile))]
        g.store(pool, vector(values + unused), mine + T.int32(i))
    with g.serial(_rows(tile)) as i:
        four = T.Bind(pool[mine + i])
        row = g.let(down + i * T.int32(DOWN))
        for j in range(_columns(tile)):
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
            for i in range(_rows(tile))
        ]
        for j in range(_columns(tile)):
            row = T.int32(tile.height + j * ACROSS) + across
            right = T.Bind(pool[row * T.int32(PITCH) + four])
            for i, x in enumerate(left):
                at = i * _columns(tile) + j
                value = part[T.int32(at)]
                for k in range(4):
                    value = value + g.lane(x, k) * g.lane(right, k)
                g.put(part, value, at)


def _rows(tile: Tile) -> int:
    """Rows of x of a thread: its number, + 8, ..."""
    return tile.height // DOWN


def _columns(tile: Tile) -> int:
    """Weight rows of a thread: its number, + 16, ..."""
    return tile.width // ACROSS
