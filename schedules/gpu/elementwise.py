"""Embedding, last rows, gated activations and expert sums on a GPU: one thread per few columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Embed, ExpertCombine, Glu, LastRows
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule

LANES = 4  # columns of one thread: a 16-byte load
TOGETHER = 4  # choices whose loads are on their way at the same time


def lanes_for(*columns: int) -> int:
    """LANES when every width and offset in `columns` is a multiple of it, else 1."""
    return LANES if all(c % LANES == 0 for c in columns) else 1


def row_spans(rows: Any, width: int, lanes: int, emit: Callable[[Any, Any], None]) -> None:
    """A kernel that calls `emit(row, column)` for every `lanes` columns of every row."""
    spans = width // lanes
    with g.each(rows * T.int32(spans)) as i:
        emit(g.let(i // T.int32(spans)), g.let(i % T.int32(spans) * T.int32(lanes)))


def lane_by_lane(lanes: int, value: Callable[[int], Any]) -> Any:
    """A vector of `value(0)`, `value(1)`, ...: the functions of a thread are scalar."""
    cell = g.local(lanes)
    for i in range(lanes):
        g.put(cell, value(i), i)
    return g.load(cell, 0, lanes=lanes)


def lane_of(vector: Any, i: int, lanes: int) -> Any:
    """Element `i` of a vector of `lanes`."""
    return vector if lanes == 1 else g.lane(vector, i)


@schedule(Embed, "gpu", "a thread per four columns, bfloat16 widened by a shift")
def embed_gpu(op: Embed, p: GpuProfile, a: SimpleNamespace) -> None:
    """ids are in [0, vocab): the caller's duty."""
    lanes = lanes_for(op.width)

    def copy(row: Any, at: Any) -> None:
        token = a.ids[row]
        if op.vocab * op.width >= 2**31:
            token = g.wide(token)
        raw = g.let(g.load(a.table, token, at, lanes=lanes))
        if op.fmt != "float32":
            words = raw
            raw = lane_by_lane(lanes, lambda i: _widened(lane_of(words, i, lanes)))
        g.store(a.out, raw, row, at, lanes=lanes)

    row_spans(a.n, op.width, lanes, copy)


def _widened(half: Any) -> Any:
    return g.bits(g.cast(half, "uint32") << T.uint32(16), "float32")


@schedule(LastRows, "gpu", "a thread per four columns")
def last_rows_gpu(op: LastRows, p: GpuProfile, a: SimpleNamespace) -> None:
    """Every sequence has at least one row."""
    lanes = lanes_for(op.width)

    def copy(s: Any, at: Any) -> None:
        last = g.let(a.seqs[s, 1] + a.seqs[s, 2] - T.int32(1))
        g.store(a.out, g.load(a.x, last, at, lanes=lanes), s, at, lanes=lanes)

    row_spans(a.m, op.width, lanes, copy)


@schedule(Glu, "gpu", "a thread per four columns of a pair")
def glu_gpu(op: Glu, p: GpuProfile, a: SimpleNamespace) -> None:
    """float32 inside, rounded once (specification 3.6b)."""
    lanes = lanes_for(op.width, op.offset, op.x_width)

    def pair(index: Any, at: Any) -> None:
        row, part = g.let(index // T.int32(op.parts)), g.let(index % T.int32(op.parts))
        first = g.let(T.int32(op.offset) + part * T.int32(2 * op.width) + at)
        gates = g.let(g.load(a.x, row, first, lanes=lanes))
        ups = g.let(g.load(a.x, row, first + T.int32(op.width), lanes=lanes))

        def value(i: int) -> Any:
            return _glu(op, lane_of(gates, i, lanes), lane_of(ups, i, lanes))

        result = lane_by_lane(lanes, value)
        g.store(a.out, result, row, part * T.int32(op.width) + at, lanes=lanes)

    row_spans(a.n * T.int32(op.parts), op.width, lanes, pair)


def _glu(op: Glu, gate: Any, up: Any) -> Any:
    if op.kind == "silu":
        return g.rounded(op.act, g.let(f.silu(gate) * up))
    if op.linear_beta is not None:
        up = _squash(up, op.linear_beta)
    return g.rounded(op.act, g.let(g.let(_squash(gate, op.beta) * f.sigmoid(gate)) * up))


def _squash(x: Any, limit: float) -> Any:
    return g.let(f.tanh(x * g.floats(1.0 / limit)) * g.floats(limit))


@schedule(ExpertCombine, "gpu", "without a norm, a thread per four columns; choices in order")
def expert_combine_gpu(op: ExpertCombine, p: GpuProfile, a: SimpleNamespace) -> None:
    """One pass, or one workgroup per row where a norm needs whole rows."""
    if op.norm:
        _combine_rows(op, p, a)
        return
    lanes = lanes_for(op.width)

    def sum_up(row: Any, at: Any) -> None:
        total = _weighted_sum(op, a, row, at, lanes)
        result = lane_by_lane(
            lanes,
            lambda i: _with_addends(
                op, a, g.rounded(op.act, g.let(total[i])), row, at + T.int32(i)
            ),
        )
        g.store(a.out, result, row, at, lanes=lanes)

    row_spans(a.n, op.width, lanes, sum_up)


def _weighted_sum(op: ExpertCombine, a: SimpleNamespace, row: Any, at: Any, lanes: int) -> Any:
    """A variable with the sum over the choices of `lanes` columns."""
    total = g.variable(g.splat(0.0, lanes))

    def add(choices: list[Any]) -> None:
        ys = [g.let(g.load(a.y, row, c * T.int32(op.width) + at, lanes=lanes)) for c in choices]
        for c, y in zip(choices, ys, strict=True):
            share = g.splat(g.let(a.weights[row, c]), lanes)
            g.store(total, g.load(total, 0, lanes=lanes) + y * share, 0, lanes=lanes)

    with g.serial(op.top_k // TOGETHER) as turn:
        add([g.let(turn * T.int32(TOGETHER) + T.int32(i)) for i in range(TOGETHER)])
    add([T.int32(c) for c in range(op.top_k // TOGETHER * TOGETHER, op.top_k)])
    return total


def _with_addends(op: ExpertCombine, a: SimpleNamespace, value: Any, row: Any, at: Any) -> Any:
    for i in range(op.addends):
        value = g.rounded(op.act, g.let(value + getattr(a, f"addend{i}")[row, at]))
    return value


def _combine_rows(op: ExpertCombine, p: GpuProfile, a: SimpleNamespace) -> None:
    """The sum (into `out`), its mean square, its norm: a row stays with its workgroup."""
    lanes = lanes_for(op.width)
    threads = g.threads_for(p, op.width // lanes, most=1024)
    with g.groups(a.n, threads) as (group, tid):
        row = g.variable(group)[0]  # else TVM multiplies 32768 workgroups by a row of choices
        sums = g.shared(threads)
        squares = g.variable(0.0)
        with columns(op.width, lanes, tid, threads) as at:
            total = _weighted_sum(op, a, row, at, lanes)
            for i in range(lanes):
                value = g.let(g.rounded(op.act, g.let(total[i])))
                g.put(total, value, i)
                g.put(squares, squares[0] + value * value)
            g.store(a.out, g.load(total, 0, lanes=lanes), row, at, lanes=lanes)
        g.store(sums, squares[0], tid)
        mean = g.sum_of(sums, tid, threads) * g.floats(1.0 / op.width)
        scale = g.let(g.floats(1.0) / T.sqrt(mean + g.floats(op.eps)))
        with columns(op.width, lanes, tid, threads) as at:
            values = normalised(op.act, a.out, a.norm_weight, row, at, scale, lanes)
            result = lane_by_lane(
                lanes,
                lambda i: _with_addends(op, a, lane_of(values, i, lanes), row, at + T.int32(i)),
            )
            g.store(a.out, result, row, at, lanes=lanes)


@contextmanager
def columns(width: int, lanes: int, tid: Any, threads: int) -> Iterator[Any]:
    """The share of one thread of a row, in vectors of `lanes`: the same in every pass over it.

    So a thread may read back what it has stored, without a barrier.
    """
    with g.strided(tid, width // lanes, threads) as i:
        yield g.let(i * T.int32(lanes))


def normalised(act: str, x: Any, weight: Any, row: Any, at: Any, scale: Any, lanes: int) -> Any:
    """weight * round(x[row] * scale), rounded, of `lanes` columns."""
    values = g.let(g.load(x, row, at, lanes=lanes))
    weights = g.let(g.load(weight, at, lanes=lanes))

    def value(i: int) -> Any:
        unit = g.rounded(act, g.let(lane_of(values, i, lanes) * scale))
        return g.rounded(act, g.let(lane_of(weights, i, lanes) * unit))

    return g.let(lane_by_lane(lanes, value))
