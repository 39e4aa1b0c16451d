"""Expert matrix products, grouped: the weights of an expert are read once for all its rows."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ExpertLinear
from k3tvm.schedules import digits
from k3tvm.schedules import vector as v
from k3tvm.schedules.digits import Digits
from k3tvm.schedules.numerics import round_to, unpack_weight
from k3tvm.schedules.profile import TargetProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.tiles import Weights, matmul, matvec, tile_of

FEW = 4  # below this many rows of an expert, on average, the matvec is faster


@dataclass(frozen=True)
class _Inputs:
    """x of every (row, choice) pair in expert order: float32 [n*top_k, k], and maybe digits.

    Digits are there when `few`, a condition in the kernel, says that experts have few rows. It
    looks at the number of rows alone, never at their routing: else a token could change the last
    bits of another one by choosing the same expert.
    """

    values: Any
    digits: Digits | None
    few: Any


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
    ExpertLinear, "cpu", "threads share the rows of every expert; matvec or decoded tiles each"
)
def expert_linear_cpu(op: ExpertLinear, p: TargetProfile, a: SimpleNamespace) -> None:
    """Every thread does its share of the blocks of all experts, so uneven routing costs nothing."""
    weights = Weights(op.fmt, op.k, p, a.weight, getattr(a, "weight_scale", None))
    inputs = _gather(op, p, a)
    blocks = -(-op.rows // v.LANES)
    height = tile_of(p).blocks
    teams = -(-blocks // height)
    share = max(1, teams // p.tasks)  # teams per task: long enough runs for the prefetcher
    with v.parallel(-(-teams // share)) as task, v.serial(op.experts) as expert:
        first = v.let(v.cast(v.load(a.first, expert, lanes=1), "int64", 1))
        count = v.let(v.cast(v.load(a.first, expert + 1, lanes=1), "int64", 1) - first)
        with T.If(count > v.int64(0)), T.Then():
            stop = v.let(T.min((task + 1) * share, v.int64(teams)))
            with v.serial_range(v.let(task * share), stop) as team:
                _team(op, a, weights, inputs, expert, first, count, team * height)


def _team(
    op: ExpertLinear,
    a: SimpleNamespace,
    weights: Weights,
    inputs: _Inputs,
    expert: Any,
    first: Any,
    count: Any,
    block: Any,
) -> None:
    """One team of blocks of one expert against all its rows."""
    blocks, height = -(-op.rows // v.LANES), tile_of(weights.profile).blocks
    # a team past the last block repeats it and writes the same values again
    members = [v.let(T.min(block + g, v.int64(blocks - 1))) for g in range(height)]
    leads = [(expert, b) for b in members]

    def finish(row: Any, g: int, value: Any) -> None:
        _finish(op, a, first + row, members[g], value)

    with T.If(inputs.few):
        with T.Then():
            for g, lead in enumerate(leads):
                with v.serial(count) as row:
                    finish(row, g, _matvec(weights, lead, inputs, first + row))
        with T.Else():
            matmul(weights, leads, inputs.values, first, count, a.n, v.int64(0), finish)


def _matvec(weights: Weights, lead: tuple[Any, ...], inputs: _Inputs, row: Any) -> Any:
    """One block times one pair's input: in digits where there are some."""
    if inputs.digits is None:
        return matvec(weights, lead, inputs.values, row, v.int64(0))
    w = weights
    return digits.matvec(w.profile, w.words, w.scale, lead, inputs.digits, row, w.k)


def _gather(op: ExpertLinear, p: TargetProfile, a: SimpleNamespace) -> _Inputs:
    """Copy the rows of x together, expert by expert, and split them into digits if few."""
    pairs = v.let(a.n * op.top_k)
    values = v.workspace([a.n * op.top_k, op.k])
    in_digits = op.fmt == "mxfp4" and digits.uses_digits(p)
    split = digits.allocate(a.n * op.top_k, op.k) if in_digits else None
    few = v.let(pairs < v.int64(FEW * op.experts))
    with v.parallel(a.n * op.top_k) as i:
        row, choice = _pair(op, a, i)
        offset = v.let(op.x_offset + (choice * op.k if op.per_choice else v.int64(0)))
        whole = op.k // v.LANES
        with v.serial(whole) as j:
            at = j * v.LANES
            v.store(values, v.load(a.x, row, offset + at), i, at)
        for at, lanes in v.chunks(op.k - whole * v.LANES):
            at += whole * v.LANES
            v.store(values, v.load(a.x, row, offset + at, lanes=lanes), i, at, lanes=lanes)
        if split:
            with T.If(few), T.Then():
                digits.quantise(p, split, i, op.k, lambda at: v.load(values, i, at))
    return _Inputs(values, split, few)


def _pair(op: ExpertLinear, a: SimpleNamespace, i: Any) -> tuple[Any, Any]:
    """(row, choice) of the i-th pair in expert order."""
    pair = v.load(a.order, v.let(i // op.top_k), v.let(i % op.top_k), lanes=1)
    pair = v.let(v.cast(pair, "int64", 1))
    return v.let(pair // op.top_k), v.let(pair % op.top_k)


def _finish(op: ExpertLinear, a: SimpleNamespace, i: Any, block: Any, value: Any) -> None:
    """Store one block of results of the i-th pair; only real rows in the last block."""
    row, choice = _pair(op, a, i)
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
