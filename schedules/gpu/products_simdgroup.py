"""A tile of weight rows times a tile of rows of x, by the matrices of Apple's SIMD groups.

Both tiles are staged in shared memory as float32 and multiplied in fragments of 8 x 8, operands and
sums float32: nothing is split or rounded, whatever the activations and the weights are. The four
SIMD groups of a workgroup have a rectangle of fragments each. The language of 2020 cannot add one
fragment to another, so every 256 elements of k the sums go to shared memory, and the threads add
them up. A result is in the order of k, so it depends neither on the size of the tile nor on the
other rows in it.

A SIMD group is 32 threads with neighbouring numbers: so it is on every Apple GPU with matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK
from k3tvm.schedules.gpu.products_tile import STEP, THREADS, Finish, Tile, stager
from k3tvm.schedules.profile import GpuProfile

Expr = Any

SIDE = 8  # of a fragment
GROUP = 32  # threads of a SIMD group
GROUPS = THREADS // GROUP
PITCH = STEP + 4  # elements of a staged row: rows begin at 16 bytes, and in different banks
STEPS = 8  # of k, after which the fragments' sums are added to the totals


@dataclass(frozen=True)
class Deal:
    """How a tile is dealt out: a rectangle of `high` x `wide` fragments for each SIMD group.

    across: rectangles side by side.
    """

    across: int
    high: int
    wide: int


def deal(height: int, width: int) -> Deal:
    """Rectangles as near to squares as possible: fewest fragments to load for each product."""
    rows, columns = height // SIDE, width // SIDE
    ways = [
        Deal(across, rows * across // GROUPS, columns // across)
        for across in (1, 2, 4)
        if columns % across == 0 and rows * across % GROUPS == 0
    ]
    return min(ways, key=lambda d: d.high + d.wide)


def pool_size(height: int, width: int) -> int:
    """Elements of shared memory: the staged tiles, or the sums of all fragments."""
    return max((height + width) * PITCH, height * width)


def fits(p: GpuProfile, height: int, width: int) -> bool:
    """Whether a device has matrices, and the shared memory for tiles of this size."""
    needed = pool_size(height, width) * 4
    return "simdgroup_matrix" in p.features and p.threads >= THREADS and p.shared_bytes >= needed


def matmul(tile: Tile, finish: Finish) -> None:
    """finish(row of the tile, weight row, sum over k of W[weight row, k] * x[row, k]).

    Shared memory holds the staged rows of x, then those of the weight.
    """
    plan = deal(tile.height, tile.width)
    pool = g.shared(pool_size(tile.height, tile.width))
    totals = g.local(tile.height * tile.width // THREADS)
    for i in range(tile.height * tile.width // THREADS):
        g.put(totals, g.floats(0.0), i)
    a, b, c = (_fragments(n) for n in (plan.high, plan.wide, plan.high * plan.wide))

    def park(row: Expr, four: Expr, value: Expr) -> None:
        g.store(pool, value, g.let(row * T.int32(PITCH) + four * T.int32(4)), lanes=4)

    stage = stager(tile, park)
    steps = -(-tile.weights.k // STEP)
    place = _Place(tile, plan)
    with g.serial(-(-steps // STEPS)) as part:
        for i in range(plan.high * plan.wide):
            T.evaluate(T.metal.make_filled_simdgroup_matrix(c.data, i, g.floats(0.0), SIDE, SIDE))
        first = g.let(part * T.int32(STEPS))
        with g.serial(T.min(T.int32(STEPS), T.int32(steps) - first)) as step:
            stage(g.let(first + step))
            g.barrier()
            _multiply(plan, place, pool, a, b, c)
            g.barrier()
        _add(tile, plan, place, pool, c, totals)
    _epilogue(tile, pool, totals, finish)


class _Place:
    """The first row and column of a SIMD group's rectangle."""

    def __init__(self, tile: Tile, plan: Deal) -> None:
        group = g.let(tile.thread // T.int32(GROUP))
        self.row = g.let(group // T.int32(plan.across) * T.int32(plan.high * SIDE))
        self.column = g.let(group % T.int32(plan.across) * T.int32(plan.wide * SIDE))
        self.x = g.let(self.row * T.int32(PITCH))
        self.weight = g.let((self.column + T.int32(tile.height)) * T.int32(PITCH))


def _fragments(count: int) -> Any:
    return T.alloc_buffer((count * SIDE * SIDE,), "float32", scope="metal.simdgroup")


def _multiply(plan: Deal, place: _Place, pool: Any, a: Any, b: Any, c: Any) -> None:
    """c_ij += a_i b_j for the staged step of k and the fragments i, j of a rectangle."""
    for k in range(0, STEP, SIDE):
        for fragments, first, count, turned in (
            (a, place.x, plan.high, False),
            (b, place.weight, plan.wide, True),  # rows of the weight become columns
        ):
            for i in range(count):
                at = T.address_of(pool[first + T.int32(i * SIDE * PITCH + k)])
                T.evaluate(T.metal.simdgroup_load(fragments.data, i, at, PITCH, SIDE, SIDE, turned))
        for i in range(plan.high):
            for j in range(plan.wide):
                n = i * plan.wide + j
                T.evaluate(
                    T.metal.simdgroup_multiply_accumulate(
                        c.data, n, a.data, i, b.data, j, c.data, n
                    )
                )


def _add(tile: Tile, plan: Deal, place: _Place, pool: Any, c: Any, totals: Any) -> None:
    """totals += the sums of all fragments; thread t has elements t, t + 128, ... of the tile."""
    first = g.let(place.row * T.int32(tile.width) + place.column)
    for i in range(plan.high):
        for j in range(plan.wide):
            at = first + T.int32((i * tile.width + j) * SIDE)
            pointer = T.address_of(pool[at])
            T.evaluate(
                T.metal.simdgroup_store(
                    c.data, i * plan.wide + j, pointer, tile.width, SIDE, SIDE, False
                )
            )
    g.barrier()
    for i in range(tile.height * tile.width // THREADS):
        value = totals[T.int32(i)] + pool[tile.thread + T.int32(i * THREADS)]
        g.put(totals, value, i)
    g.barrier()


def _epilogue(tile: Tile, pool: Any, totals: Any, finish: Finish) -> None:
    """finish() for every result; a thread parks its own where a loop can index them."""
    count = tile.height * tile.width // THREADS
    for i in range(count):
        g.put(pool, totals[T.int32(i)], tile.thread + T.int32(i * THREADS))
    with g.serial(count) as i:
        element = g.let(i * T.int32(THREADS) + tile.thread)
        row = g.let(element // T.int32(tile.width))
        column = tile.first * T.int32(BLOCK) + element % T.int32(tile.width)
        finish(row, g.let(column), g.let(pool[element]))
