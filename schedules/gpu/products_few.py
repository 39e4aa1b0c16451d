"""Products of a block of 16 weight rows with a few rows of x: one workgroup, k shared out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK, Weights
from k3tvm.schedules.profile import GpuProfile

Expr = Any
Load = Callable[[int, Expr, int], Expr]  # (which row of x, first k, lanes)
Finish = Callable[[Expr, Expr, Expr], None]  # (which row of x, row of the block, value)


@dataclass(frozen=True)
class Team:
    """The threads of a workgroup: `quads` of them read a step of k, `parts` steps at a time."""

    weights: Weights
    threads: int
    thread: Expr

    @property
    def parts(self) -> int:
        """Steps of k that are read at the same time."""
        return self.threads // self.weights.quads


def batch_of(weights: Weights) -> int:
    """Units that a thread loads before it uses the first, to wait for memory once."""
    return 2 if weights.fmt == "mxfp4" else 4


def threads_of(weights: Weights, p: GpuProfile) -> int:
    """Threads that share a block: up to 256, as long as each has a batch of units to itself."""
    units, threads = weights.units * weights.quads, 32
    while threads * 2 <= min(256, p.threads) and threads * batch_of(weights) < units:
        threads *= 2
    return threads


def matvec(team: Team, lead: Sequence[Expr], x: Load, count: int, finish: Finish) -> None:
    """finish(i, row, sum over k of W[lead, row, k] * x_i[k]) for i < count and 16 rows.

    `count` is small and known at compile time: the weights are read once for all rows of x. Each
    row of x has its own sums in an order that does not depend on `count`.
    """
    w = team.weights
    held = len(w.rows(T.int32(0)))
    sums = g.shared(BLOCK * (team.parts + 2))
    tops = g.shared(count * team.threads)
    total = g.local(count * held)
    for i in range(count * held):
        g.put(total, g.floats(0.0), i)
    quad = g.let(team.thread % T.int32(w.quads))
    part = g.let(team.thread // T.int32(w.quads))
    _accumulate(team, lead, x, count, total, part, quad)
    for i in range(count):
        for r, row in enumerate(w.rows(quad)):
            # the odd pitch keeps the four quads of a step in different banks
            g.store(sums, total[T.int32(i * held + r)], row * T.int32(team.parts + 2) + part)
        g.barrier()
        _reduce(team, sums, tops, i)
        g.barrier()
    with g.strided(team.thread, count * BLOCK, team.threads) as at:
        i, row = g.let(at // T.int32(BLOCK)), g.let(at % T.int32(BLOCK))
        value = g.variable(0.0)
        with g.serial(team.threads // BLOCK) as s:
            g.put(value, value[0] + tops[i * T.int32(team.threads) + s * T.int32(BLOCK) + row])
        finish(i, row, g.let(value[0]))


def _accumulate(
    team: Team, lead: Sequence[Expr], x: Load, count: int, total: Any, part: Expr, quad: Expr
) -> None:
    """total[i][row] over this thread's steps part, part + parts, ...: batches, then the rest."""
    units, stride = team.weights.units, team.parts * batch_of(team.weights)
    with g.serial(units // stride) as turn:
        steps = [
            g.let(turn * T.int32(stride) + T.int32(u * team.parts) + part)
            for u in range(batch_of(team.weights))
        ]
        loaded = [team.weights.unit(lead, step, quad) for step in steps]
        for step, unit in zip(steps, loaded, strict=True):
            _add(team.weights, unit, step, x, count, total)
    done = units // stride * stride
    if done < units:
        with g.strided(part, units - done, team.parts) as rest:
            step = g.let(rest + T.int32(done))
            _add(team.weights, team.weights.unit(lead, step, quad), step, x, count, total)


def _add(
    w: Weights, unit: tuple[Expr, list[Expr]], step: Expr, x: Load, count: int, total: Any
) -> None:
    """total[i][row] += W * x_i over the unit's elements."""
    words, scales = unit
    xs = [_elements(x, i, step, w.depth) for i in range(count)]
    values = w.values(words)
    for r, row in enumerate(values):
        elements = [g.let(v) for v in row] if count > 1 else row
        for i in range(count):
            at = i * len(values) + r
            if not scales:
                g.put(total, total[T.int32(at)] + elements[0] * xs[i][0], at)
                continue
            dot = elements[0] * xs[i][0]
            for value, factor in zip(elements[1:], xs[i][1:], strict=True):
                dot = dot + value * factor
            g.put(total, total[T.int32(at)] + dot * scales[r], at)


def _elements(x: Load, i: int, step: Expr, depth: int) -> list[Expr]:
    """x_i[step * depth :][: depth], in registers."""
    if depth == 1:
        return [T.Bind(x(i, step, 1))]
    fours = [T.Bind(x(i, step * T.int32(depth) + T.int32(at), 4)) for at in range(0, depth, 4)]
    return [g.let(g.lane(four, j)) for four in fours for j in range(4)]


def _reduce(team: Team, sums: Any, tops: Any, i: int) -> None:
    """tops[i, segment, row] = sums[row, segment + 0, 1, ... * segments], one for each thread."""
    segments = team.threads // BLOCK
    row = g.let(team.thread % T.int32(BLOCK))
    segment = g.let(team.thread // T.int32(BLOCK))
    first = g.let(row * T.int32(team.parts + 2) + segment)
    value = g.variable(sums[first])
    for at in range(segments, team.parts, segments):
        g.put(value, value[0] + sums[first + T.int32(at)])
    g.store(tops, value[0], T.int32(i * team.threads) + team.thread)
