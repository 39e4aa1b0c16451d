"""What a workgroup does of a product of few rows on CUDA's tensor cores, in any weight format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import Weights

Expr = Any
Finish = Callable[[Expr, Expr, Expr], None]  # (which row of x, row of the strip, value)
Read = Callable[[Expr, Expr, Expr, int], Expr]  # (row, choice, first k, lanes) -> values of x

WARP = 32
MOST_WARPS = 8  # of a workgroup; they share k


@dataclass(frozen=True)
class Strip:
    """Some blocks of weight rows times `fragments` times a few rows of x.

    lead(block): leading indices of a block of the weights, `blocks` in all; first: of the strip.
    x: prepared rows; source(i) is (row, choice) of row i of the strip. Fragments of which live(i)
    is not true of their first row are left out; there may be no others after them.
    """

    weights: Weights
    lead: Callable[[Expr], Sequence[Expr]]
    blocks: int
    first: Expr
    x: Any
    fragments: int
    source: Callable[[Expr], tuple[Expr, Expr]]
    live: Callable[[Expr], Expr]
    thread: Expr

    def row(self, i: Expr) -> Expr:
        """The word where row i begins in the flat x."""
        row, choice = self.source(g.let(i))
        return (row * self.x.shape[1] + choice) * self.x.shape[2]

    def word(self, at: Expr, lanes: int) -> Expr:
        """Words of the flat x."""
        return g.load(self.x, T.int32(0), T.int32(0), at, lanes=lanes)


@dataclass(frozen=True)
class FewOnCores:
    """How products of few rows are made in one weight format.

    rows: of the weight in a strip. columns: rows of x in a fragment. most: fragments at a time.
    prepare(rows, choices, read): emits the launch that prepares rows of x.
    """

    rows: int
    columns: int
    most: int
    threads: int
    prepare: Callable[[Expr, int, Read], Any]
    matvec: Callable[[Strip, Finish], None]


def warps_of(units: int, least: int) -> int:
    """Warps that share `units` of k, each `least` of them or more, if there are as many."""
    warps = 1
    while warps < MOST_WARPS and 2 * warps * least <= units:
        warps *= 2
    return warps


def if_sure(condition: Expr, sure: bool) -> AbstractContextManager[None]:
    """The body under a condition that whole warps share, if that does not hold anyway."""
    return nullcontext() if sure else g.when(condition)


def share_out(
    units: int, warps: int, warp: Expr, multiply: Callable[[Expr, Expr | None, bool], None]
) -> None:
    """multiply(unit, the one after it or None, even) for the units of k that are this warp's.

    even: all warps have as many, so the unit after it exists.
    """
    turns, even = -(-units // warps), units % warps == 0

    def turn(number: Expr, more: bool) -> None:
        unit = g.let(number * T.int32(warps) + warp)
        with if_sure(unit < T.int32(units), sure=even):
            multiply(unit, g.let(unit + T.int32(warps)) if more else None, even)

    if turns > 1:
        with g.serial(turns - 1) as number:
            turn(number, more=True)
    turn(T.int32(turns - 1), more=False)


def add_up(
    strip: Strip, warps: int, parts: Any, size: tuple[int, int, int], finish: Finish
) -> None:
    """finish() for the sums over i of parts[i, row of x, weight row], of this size, in order."""
    count, tokens, rows = size
    with g.strided(strip.thread, tokens * rows, WARP * warps) as at:
        value = g.variable(parts[at])
        with g.serial_range(1, count) as part:
            g.put(value, value[0] + parts[part * T.int32(tokens * rows) + at])
        finish(g.let(at // T.int32(rows)), g.let(at % T.int32(rows)), g.let(value[0]))
