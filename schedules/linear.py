"""Linear layers: matvec for few rows, matmul for many; threads stream their part of the weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Linear
from k3tvm.schedules import vector as v
from k3tvm.schedules.numerics import round_to, unpack_weight
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.tiles import Weights, matmul, matvec, tile_of

FEW = 4  # below this many rows the matvec, which needs no decoded copy, is faster


@reference(Linear)
def linear_reference(op: Linear, args: Any) -> dict[str, np.ndarray]:
    """float64 product, rounded where the operator says so."""
    weight = unpack_weight(op.fmt, args.weight, getattr(args, "weight_scale", None), op.rows)
    weight = weight.reshape(op.groups, op.rows, op.k)
    starts = [op.x_offset + g * op.x_stride for g in range(op.groups)]
    x = [args.x[:, at : at + op.k].astype(np.float64) for at in starts]
    out = np.concatenate([x[g] @ weight[g].T for g in range(op.groups)], axis=1)
    out[:, op.exact_rows :] = round_to(op.act, out[:, op.exact_rows :])
    for i in range(op.addends):
        out = round_to(op.act, out + getattr(args, f"addend{i}"))
    return {"out": out}


@schedule(Linear, "cpu", "16 weight rows in vector lanes; few rows: matvec, many: decoded tiles")
def linear_cpu(op: Linear, p: CpuProfile, a: SimpleNamespace) -> None:
    """The packed blocks are split over the threads; each streams its part of the weight once."""
    weights = Weights(op.fmt, op.k, p, a.weight, getattr(a, "weight_scale", None))
    with T.If(a.n < v.int64(FEW)):
        with T.Then():
            _few(op, a, weights)
        with T.Else():
            _many(op, p, a, weights)


def _few(op: Linear, a: SimpleNamespace, weights: Weights) -> None:
    blocks = -(-op.rows // v.LANES)
    with v.parallel(op.groups * blocks) as task:
        group, block = v.let(task // blocks), v.let(task % blocks)
        with v.serial(a.n) as row:
            offset = op.x_offset + group * op.x_stride
            value = matvec(weights, _lead(op, group, block), a.x, row, offset)
            _finish(op, a, row, group, block, value)


def _many(op: Linear, p: CpuProfile, a: SimpleNamespace, weights: Weights) -> None:
    blocks, height = -(-op.rows // v.LANES), tile_of(p).blocks
    teams = -(-blocks // height)
    with v.parallel(op.groups * teams) as task:
        group, first = v.let(task // teams), v.let(task % teams * height)
        # a team past the last block repeats it and writes the same values again
        members = [v.let(T.min(first + g, v.int64(blocks - 1))) for g in range(height)]
        matmul(
            weights,
            [_lead(op, group, b) for b in members],
            a.x,
            v.int64(0),
            a.n,
            a.n,
            op.x_offset + group * op.x_stride,
            lambda row, g, value: _finish(op, a, row, group, members[g], value),
        )


def _lead(op: Linear, group: Any, block: Any) -> tuple[Any, ...]:
    return (group, block) if op.groups > 1 else (block,)


def _finish(op: Linear, a: SimpleNamespace, row: Any, group: Any, block: Any, value: Any) -> None:
    """Round, add the addends, and store one block of results; only real rows in the last block."""
    column = v.let(group * op.rows + block * v.LANES)
    tail = op.rows % v.LANES
    if not tail:
        _store(op, a, row, column, value, v.LANES)
        return
    last = -(-op.rows // v.LANES) - 1
    with T.If(block < v.int64(last)):
        with T.Then():
            _store(op, a, row, column, value, v.LANES)
        with T.Else():
            for at, lanes in v.chunks(tail):
                part = T.Shuffle([value], list(range(at, at + lanes)))
                _store(op, a, row, column + at, part, lanes)


def _store(op: Linear, a: SimpleNamespace, row: Any, column: Any, value: Any, lanes: int) -> None:
    result = value
    if op.act != "float32":
        result = v.rounded(op.act, value, lanes)
        if op.exact_rows:
            lane = T.Ramp(v.int64(column), v.int64(1), lanes) if lanes > 1 else v.int64(column)
            result = T.Select(lane < v.splat(op.exact_rows, lanes, "int64"), value, result)
    for i in range(op.addends):
        addend = v.load(getattr(a, f"addend{i}"), row, column, lanes=lanes)
        result = v.rounded(op.act, result + addend, lanes)
    v.store(a.out, result, row, column, lanes=lanes)
