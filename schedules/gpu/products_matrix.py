"""Products of a tile of weight rows with a tile of rows of x by cooperative matrices.

Both tiles are staged in shared memory as float16 and multiplied in fragments of 16 x 16 with
float32 sums. The fragments are dealt out to the subgroups in rectangles. A subgroup has room for
the sums of one rectangle; where there are more rectangles than subgroups, the workgroup goes along
k again for the next ones. So the result does not depend on the size of a subgroup, only the time.

Rows of x that hold float16 values stay exact; weights are rounded to float16, as they are in a
float16 run. BF16 loses bits below 2^-14 only, MXFP4 is exact for scale bytes 104 to 140, F32 keeps
11 bits, and what is beyond 65504 becomes infinite (docs/numerics.md has the conditions). A sum is
in the order of k, so it depends neither on the size of the tile nor on the other rows in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Activation
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu import products_many, products_simdgroup
from k3tvm.schedules.gpu.products import BLOCK
from k3tvm.schedules.gpu.products_tile import STEP, THREADS, Finish, Product, Tile, stager
from k3tvm.schedules.profile import GpuProfile

Expr = Any

NEEDS = frozenset({"cooperative_matrix", "float16"})
SIDE = 16  # of a fragment
PITCH = STEP + 8  # elements of a staged row: rows begin at 16 bytes, and in different banks
AREA = SIDE * SIDE  # elements of a fragment's sums in shared memory
MOST = 8  # fragments whose sums a subgroup holds
USUAL = 32  # threads of a subgroup, where the profile does not know


@dataclass(frozen=True)
class Deal:
    """How a tile is dealt out: `down` x `across` rectangles of `high` x `wide` fragments."""

    down: int
    across: int
    high: int
    wide: int

    @property
    def rectangles(self) -> int:
        """How many subgroups can take part."""
        return self.down * self.across

    @property
    def fragments(self) -> int:
        """Fragments of a rectangle."""
        return self.high * self.wide


def deal(p: GpuProfile, height: int, width: int) -> Deal:
    """Rectangles as near to squares as possible, one for each subgroup that `p` lets expect."""
    high, wide = rows, columns = height // SIDE, width // SIDE
    share = rows * columns * (p.subgroup or USUAL) // THREADS
    while high * wide > max(1, min(share, MOST)):
        high, wide = (high // 2, wide) if high >= wide else (high, wide // 2)
    return Deal(rows // high, columns // wide, high, wide)


def fits(p: GpuProfile, height: int, width: int) -> bool:
    """Whether a device has cooperative matrices, and the shared memory for tiles of this size."""
    needed = (height + width) * PITCH * 2 + deal(p, height, width).rectangles * AREA * 4
    return p.features >= NEEDS and p.threads >= THREADS and p.shared_bytes >= needed


def product_of(p: GpuProfile, act: Activation, sizes: Sequence[tuple[int, int]]) -> Product:
    """What multiplies tiles of these sizes (height, width).

    Matrices of SIMD groups, which are exact, where the profile has them and all sizes fit.
    Cooperative matrices likewise, if the rows of x hold float16 values, as they do with float16
    activations. Else the exact float32 product.
    """
    if all(products_simdgroup.fits(p, *size) for size in sizes):
        return products_simdgroup.matmul
    if act == "float16" and all(fits(p, *size) for size in sizes):
        return partial(matmul, p)
    return products_many.matmul


def is_exact(product: Product) -> bool:
    """Whether a product takes float32 rows of x and weights as they are."""
    return product in (products_many.matmul, products_simdgroup.matmul)


def matmul(p: GpuProfile, tile: Tile, finish: Finish) -> None:
    """finish(row of the tile, weight row, sum over k of W[weight row, k] * x[row, k]).

    All conditions around cooperative matrices are the same for a whole subgroup, those around
    barriers for the whole workgroup.
    """
    plan = deal(p, tile.height, tile.width)
    staged = g.shared((tile.height + tile.width) * PITCH, "float16")
    areas = g.shared(plan.rectangles * AREA)
    subgroups = g.let(T.call_extern("int32", "gl_NumSubgroups"))
    subgroup = g.let(T.call_extern("int32", "gl_SubgroupID"))

    def park(row: Expr, four: Expr, value: Expr) -> None:
        at = g.let(row * T.int32(PITCH) + four * T.int32(4))
        g.store(staged, g.cast(value, "float16", 4), at, lanes=4)

    stage = stager(tile, park)
    rounds = T.truncdiv(T.int32(plan.rectangles - 1) + subgroups, subgroups)
    with g.serial(rounds) as turn:
        first = g.let(turn * subgroups)
        mine = g.let(first + subgroup)
        for i in range(plan.fragments):
            _do("fill", "c", i, g.floats(0.0))
        with g.serial(-(-tile.weights.k // STEP)) as step:
            stage(step)
            g.barrier()
            with g.when(mine < T.int32(plan.rectangles)):
                _multiply(tile, plan, staged, mine)
            g.barrier()
        count = g.let(T.min(T.int32(plan.rectangles) - first, subgroups))
        _epilogue(tile, plan, areas, _Turn(first, mine, count), finish)


@dataclass(frozen=True)
class _Turn:
    """The rectangles of one round: first ... first + count - 1; `mine` is this subgroup's."""

    first: Expr
    mine: Expr
    count: Expr


def _multiply(tile: Tile, plan: Deal, staged: Any, mine: Expr) -> None:
    """c_ij += a_i b_j for the staged step of k and the fragments i, j of a rectangle."""
    down, across = _place(plan, mine)
    x = g.let(down * T.int32(plan.high * SIDE * PITCH))
    weight = g.let((across * T.int32(plan.wide * SIDE) + T.int32(tile.height)) * T.int32(PITCH))
    for k in range(0, STEP, SIDE):
        for name, start, count, layout in (
            ("a", x, plan.high, "row"),
            ("b", weight, plan.wide, "column"),
        ):
            for i in range(count):
                at = start + T.int32(i * SIDE * PITCH + k)
                _do("load", name, i, T.address_of(staged[at]), PITCH, layout)
        for i in range(plan.high):
            for j in range(plan.wide):
                _do("mma", i * plan.wide + j, i, j)


def _epilogue(tile: Tile, plan: Deal, areas: Any, turn: _Turn, finish: Finish) -> None:
    """finish() for every result of a round, one fragment of each rectangle at a time."""
    high, low = g.let(tile.thread // T.int32(SIDE)), g.let(tile.thread % T.int32(SIDE))
    parts = AREA // THREADS
    with g.serial(plan.fragments) as fragment:
        with g.when(turn.mine < T.int32(plan.rectangles)):
            at = g.let(turn.mine * T.int32(AREA))
            for i in range(plan.fragments):
                with g.when(fragment == T.int32(i)):
                    _do("store", "c", i, T.address_of(areas[at]), SIDE, "row")
        g.barrier()
        i, j = fragment // T.int32(plan.wide), fragment % T.int32(plan.wide)
        with g.serial(turn.count * T.int32(parts)) as part:
            rectangle = g.let(turn.first + part // T.int32(parts))
            inside = g.let(part % T.int32(parts) * T.int32(SIDE // parts) + high)
            value = g.let(areas[rectangle * T.int32(AREA) + inside * T.int32(SIDE) + low])
            down, across = _place(plan, rectangle)
            row = (down * T.int32(plan.high) + i) * T.int32(SIDE) + inside
            column = (across * T.int32(plan.wide) + j) * T.int32(SIDE) + low
            finish(g.let(row), g.let(tile.first * T.int32(BLOCK) + column), value)
        g.barrier()


def _place(plan: Deal, rectangle: Expr) -> tuple[Expr, Expr]:
    """(down, across) of a rectangle."""
    down = g.let(T.truncdiv(rectangle, T.int32(plan.across)))
    return down, g.let(rectangle - down * T.int32(plan.across))


def _do(word: str, *arguments: Any) -> None:
    """One operation on cooperative matrices (`k3tvm.vulkan.glsl.cooperative`)."""
    T.evaluate(T.call_extern("int32", f"k3_coopmat_{word}", *arguments))
