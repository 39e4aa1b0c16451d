"""Expert matrix products, grouped: the weights of an expert are read once for all its rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ExpertLinear
from k3tvm.schedules import digits
from k3tvm.schedules import vector as v
from k3tvm.schedules.digits import Digits
from k3tvm.schedules.numerics import round_to, unpack_weight
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.spans import along
from k3tvm.schedules.tiles import Weights, matmul, matvec, tile_of

FEW = 4  # below this many rows of an expert, on average, the matvec is faster


@reference(ExpertLinear)
def expert_linear_reference(op: ExpertLinear, args: Any) -> dict[str, np.ndarray]:
    """Row by row, choice by choice, in float64."""
    rows = args.x.shape[0]
    out = np.zeros((rows, op.top_k, op.rows))
    scale = getattr(args, "weight_scale", None)
    for e in np.unique(args.chosen):
        w = unpack_weight(op.fmt, args.weight[e], None if scale is None else scale[e], op.rows)
        for t, c in np.argwhere(args.chosen == e):
            at = op.x_offset + (c * op.k if op.per_choice else 0)
            out[t, c] = w @ args.x[t, at : at + op.k].astype(np.float64)
    return {"out": round_to(op.act, out.reshape(rows, -1))}


@schedule(
    ExpertLinear, "cpu", "threads share the rows of every expert; few rows: matvec, many: tiles"
)
def expert_linear_cpu(op: ExpertLinear, p: CpuProfile, a: SimpleNamespace) -> None:
    """The choice of the path looks at the number of rows alone, never at their routing.

    Else a token could change the last bits of another one by choosing the same expert.
    """
    weights = Weights(op.fmt, op.k, p, a.weight, getattr(a, "weight_scale", None))
    with T.If(a.n * op.top_k < v.int64(FEW * op.experts)):
        with T.Then():
            _few(op, p, a, weights)
        with T.Else():
            _many(op, p, a, weights)


def _few(op: ExpertLinear, p: CpuProfile, a: SimpleNamespace, weights: Weights) -> None:
    """Every block of an expert against one row after the other, in digits where there are some."""
    split = _digits(op, p, a) if op.fmt == "mxfp4" and digits.uses_digits(p) else None

    def value(lead: tuple[Any, ...], row: Any, choice: Any) -> Any:
        if split:
            at = v.let(row * op.top_k + choice) if op.per_choice else row
            return digits.matvec(p, a.weight, a.weight_scale, lead, split, at, op.k)
        return matvec(weights, lead, a.x, row, _offset(op, choice))

    def team(expert: Any, first: Any, count: Any, members: list[Any]) -> None:
        for block in members:
            with v.serial(count) as i:
                row, choice = _pair(op, a, first + i)
                _finish(op, a, row, choice, block, value((expert, block), row, choice))

    _for_teams(op, p, a, team)


def _many(op: ExpertLinear, p: CpuProfile, a: SimpleNamespace, weights: Weights) -> None:
    """Teams of blocks against all rows of an expert, which are copied together first."""
    inputs = _gather(op, a)

    def team(expert: Any, first: Any, count: Any, members: list[Any]) -> None:
        def finish(i: Any, g: int, value: Any) -> None:
            _finish(op, a, *_pair(op, a, first + i), members[g], value)

        leads = [(expert, block) for block in members]
        matmul(weights, leads, inputs, first, count, a.n, v.int64(0), finish)

    _for_teams(op, p, a, team)


def _for_teams(
    op: ExpertLinear,
    p: CpuProfile,
    a: SimpleNamespace,
    team: Callable[[Any, Any, Any, list[Any]], None],
) -> None:
    """team(expert, first pair, pairs, blocks) for all blocks of all experts that are chosen.

    Every thread does its share of the blocks of each expert, so uneven routing costs nothing.
    """
    blocks, height = -(-op.rows // v.LANES), tile_of(p).blocks
    teams = -(-blocks // height)
    share = max(1, teams // p.tasks)  # teams per task: long enough runs for the prefetcher
    with v.parallel(-(-teams // share)) as task, v.serial(op.experts) as expert:
        first = v.let(v.cast(v.load(a.first, expert, lanes=1), "int64", 1))
        count = v.let(v.cast(v.load(a.first, expert + 1, lanes=1), "int64", 1) - first)
        with T.If(count > v.int64(0)), T.Then():
            stop = v.let(T.min((task + 1) * share, v.int64(teams)))
            with v.serial_range(v.let(task * share), stop) as t:
                # a team past the last block repeats it and writes the same values again
                last = v.int64(blocks - 1)
                members = [v.let(T.min(t * height + g, last)) for g in range(height)]
                team(expert, first, count, members)


def _offset(op: ExpertLinear, choice: Any) -> Any:
    """Where the input of a choice begins in a row of x."""
    return v.let(op.x_offset + choice * op.k) if op.per_choice else v.int64(op.x_offset)


def _digits(op: ExpertLinear, p: CpuProfile, a: SimpleNamespace) -> Digits:
    """x in digits: one row per pair, or per row of x when the choices share it."""
    choices = op.top_k if op.per_choice else 1
    split = digits.allocate(a.n * choices, op.k)
    with v.parallel(a.n * choices) as i:
        row, choice = v.let(i // choices), v.let(i % choices)
        offset = _offset(op, choice)
        digits.quantise(p, split, i, op.k, lambda at: v.load(a.x, row, offset + at))
    return split


def _gather(op: ExpertLinear, a: SimpleNamespace) -> Any:
    """x of every (row, choice) pair in expert order: float32 [n * top_k, k]."""
    values = v.workspace([a.n * op.top_k, op.k])
    with v.parallel(a.n * op.top_k) as i:
        row, choice = _pair(op, a, i)
        offset = _offset(op, choice)

        def copy(at: Any, lanes: int) -> None:
            v.store(values, v.load(a.x, row, offset + at, lanes=lanes), i, at, lanes=lanes)

        along(op.k, copy)
    return values


def _pair(op: ExpertLinear, a: SimpleNamespace, i: Any) -> tuple[Any, Any]:
    """(row, choice) of the i-th pair in expert order."""
    pair = v.load(a.order, v.let(i // op.top_k), v.let(i % op.top_k), lanes=1)
    pair = v.let(v.cast(pair, "int64", 1))
    return v.let(pair // op.top_k), v.let(pair % op.top_k)


def _finish(
    op: ExpertLinear, a: SimpleNamespace, row: Any, choice: Any, block: Any, value: Any
) -> None:
    """Store one block of results of a pair; only real rows in the last block."""
    value = v.let(v.rounded(op.act, value))
    column = v.let(choice * op.rows + block * v.LANES)
    tail = op.rows % v.LANES
    if not tail:
        v.store(a.out, value, row, column)
        return
    with T.If(block < v.int64(op.rows // v.LANES)):
        with T.Then():
            v.store(a.out, value, row, column)
        with T.Else():
            for at, lanes in v.chunks(tail):
                part = T.Shuffle([value], list(range(at, at + lanes)))
                v.store(a.out, part, row, column + at, lanes=lanes)
