"""Embedding rows, last rows, gated activations and expert sums: all stream their input once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Embed, ExpertCombine, Glu, LastRows
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.norms import mean_square, normalise
from k3tvm.schedules.numerics import bfloat16_values, round_to, sigmoid
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule

# Columns of one parallel task: enough work to pay for a task, few enough to split one row.
SPAN = 512


def row_spans(rows: Any, width: int, emit: Any) -> None:
    """`emit(row, column, lanes)` for every vector of every row; rows and spans in parallel."""
    spans = width // SPAN
    if spans:
        with v.parallel(rows * spans) as task:
            row, first = v.let(task // spans), v.let(task % spans * SPAN)
            with v.serial(SPAN // v.LANES) as i:
                emit(row, first + i * v.LANES, v.LANES)
    rest = width - spans * SPAN
    if rest:
        with v.parallel(rows) as row:
            with v.serial(rest // v.LANES) as i:
                emit(row, spans * SPAN + i * v.LANES, v.LANES)
            whole = width // v.LANES * v.LANES
            for at, lanes in v.chunks(width - whole):
                emit(row, whole + at, lanes)


@reference(Embed)
def embed_reference(op: Embed, args: Any) -> dict[str, np.ndarray]:
    """Rows of the table."""
    rows = args.table[args.ids]
    return {"out": rows.astype(np.float64) if op.fmt == "float32" else bfloat16_values(rows)}


@schedule(Embed, "cpu", "rows copied in parallel, bfloat16 widened by a shift")
def embed_cpu(op: Embed, p: CpuProfile, a: SimpleNamespace) -> None:
    """ids are in [0, vocab): the caller's duty."""

    def widened(row: Any, at: Any, lanes: int) -> Any:
        raw = v.load(a.table, v.cast(a.ids[row], "int64", 1), at, lanes=lanes)
        if op.fmt == "float32":
            return raw
        high = v.cast(raw, "uint32", lanes) << v.splat(16, lanes, "uint32")
        return v.bits(high, "float32", lanes)

    def copy(row: Any, at: Any, lanes: int) -> None:
        v.store(a.out, widened(row, at, lanes), row, at, lanes=lanes)

    row_spans(a.n, op.width, copy)


@reference(LastRows)
def last_rows_reference(op: LastRows, args: Any) -> dict[str, np.ndarray]:
    """The last row of each sequence."""
    return {"out": args.x[[first + rows - 1 for _, first, rows, _ in args.seqs]]}


@schedule(LastRows, "cpu", "rows copied in parallel")
def last_rows_cpu(op: LastRows, p: CpuProfile, a: SimpleNamespace) -> None:
    """Every sequence has at least one row."""

    def copy(sequence: Any, at: Any, lanes: int) -> None:
        last = a.seqs[sequence, v.int64(1)] + a.seqs[sequence, v.int64(2)] - T.int32(1)
        value = v.load(a.x, v.cast(last, "int64", 1), at, lanes=lanes)
        v.store(a.out, value, sequence, at, lanes=lanes)

    row_spans(a.m, op.width, copy)


@reference(Glu)
def glu_reference(op: Glu, args: Any) -> dict[str, np.ndarray]:
    """float64 throughout, rounded once."""
    stop = op.offset + op.parts * 2 * op.width
    x = args.x[:, op.offset : stop].astype(np.float64)
    x = x.reshape(len(x), op.parts, 2, op.width)
    g, u = x[:, :, 0], x[:, :, 1]
    if op.kind == "silu":
        out = g * sigmoid(g) * u
    else:
        out = op.beta * np.tanh(g / op.beta) * sigmoid(g) * _squashed(u, op.linear_beta)
    return {"out": round_to(op.act, out.reshape(len(x), -1))}


def _squashed(u: np.ndarray, limit: float | None) -> np.ndarray:
    return u if limit is None else limit * np.tanh(u / limit)


@schedule(Glu, "cpu", "16 lanes; rows, pairs and spans of columns in parallel")
def glu_cpu(op: Glu, p: CpuProfile, a: SimpleNamespace) -> None:
    """float32 inside, rounded once (specification 3.6b)."""

    def squash(x: Any, limit: float, lanes: int) -> Any:
        unit = f.tanh(p, x * v.splat(1.0 / limit, lanes), lanes)
        return unit * v.splat(limit, lanes)

    def pair(row: Any, at: Any, lanes: int) -> None:
        part, column = (v.let(row % op.parts), v.let(row // op.parts)) if op.parts > 1 else (0, row)
        first = v.let(op.offset + part * (2 * op.width) + at)
        g = v.let(v.load(a.x, column, first, lanes=lanes))
        u = v.let(v.load(a.x, column, first + op.width, lanes=lanes))
        if op.kind == "silu":
            value = f.silu(p, g, lanes) * u
        else:
            up = u if op.linear_beta is None else squash(u, op.linear_beta, lanes)
            value = squash(g, op.beta, lanes) * f.sigmoid(p, g, lanes) * up
        value = v.rounded(op.act, value, lanes)
        v.store(a.out, value, column, part * op.width + at, lanes=lanes)

    row_spans(a.n * op.parts, op.width, pair)


@reference(ExpertCombine)
def expert_combine_reference(op: ExpertCombine, args: Any) -> dict[str, np.ndarray]:
    """Sum, norm and addends in float64, rounded after each (the norm also before its weight)."""
    y = args.y.astype(np.float64).reshape(-1, op.top_k, op.width)
    out = round_to(op.act, np.einsum("tcd,tc->td", y, args.weights.astype(np.float64)))
    if op.norm:
        unit = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + op.eps)
        out = round_to(op.act, args.norm_weight * round_to(op.act, unit))
    for i in range(op.addends):
        out = round_to(op.act, out + getattr(args, f"addend{i}"))
    return {"out": out}


@schedule(
    ExpertCombine, "cpu", "choices summed in order, spans of columns in parallel; then the norm"
)
def expert_combine_cpu(op: ExpertCombine, p: CpuProfile, a: SimpleNamespace) -> None:
    """Two passes where a norm needs whole rows, so that the sum of one row is split as well."""

    def with_addends(value: Any, row: Any, at: Any, lanes: int) -> Any:
        for i in range(op.addends):
            addend = v.load(getattr(a, f"addend{i}"), row, at, lanes=lanes)
            value = v.rounded(op.act, value + addend, lanes)
        return value

    def weighted_sum(row: Any, at: Any, lanes: int) -> None:
        total = v.load(a.y, row, at, lanes=lanes) * v.splat(a.weights[row, v.int64(0)], lanes)
        for c in range(1, op.top_k):
            y = v.load(a.y, row, c * op.width + at, lanes=lanes)
            total = v.fma(p, y, v.splat(a.weights[row, v.int64(c)], lanes), total, lanes)
        total = v.rounded(op.act, total, lanes)
        if not op.norm:
            total = with_addends(total, row, at, lanes)
        v.store(a.out, total, row, at, lanes=lanes)

    def add(row: Any, at: Any, lanes: int) -> None:
        value = with_addends(v.load(a.out, row, at, lanes=lanes), row, at, lanes)
        v.store(a.out, value, row, at, lanes=lanes)

    row_spans(a.n, op.width, weighted_sum)
    if op.norm:
        with v.parallel(a.n) as row:
            ms = mean_square(p, a.out, row, op.width)
            scale = v.let(T.float32(1.0) / v.float_intrinsic("sqrt", 1, ms + T.float32(op.eps)))
            normalise(op, a.out, a.norm_weight, a.out, row, scale)
        if op.addends:
            row_spans(a.n, op.width, add)
