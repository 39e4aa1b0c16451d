"""Residual attention over the bank, with the RMSNorm that follows, on a GPU: workgroup per row."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import AttnResNorm, BankPush
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.elementwise import columns, lanes_for, normalised
from k3tvm.schedules.gpu.norms import flag_row, inverse_rms
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule

TOGETHER = 4  # entries whose loads are on their way at the same time, whose sums are joined at once
MOST_THREADS = 512


@schedule(BankPush, "gpu", "a workgroup per row")
def bank_push_gpu(op: BankPush, p: GpuProfile, a: SimpleNamespace) -> None:
    """The row's inverse norm, then its copy."""
    threads = g.threads_for(p, op.width)
    with g.groups(a.n, threads) as (row, tid):
        sums = g.shared(threads)
        _, scale = inverse_rms(a.stream, row, op.width, op.eps, tid, threads, sums)
        with g.when(tid == T.int32(0)):
            g.store(a.inverse_rms, scale, a.count, row)
        with g.strided(tid, op.width, threads) as at:
            g.store(a.bank, a.stream[row, at], a.count, row, at)


@dataclass(frozen=True)
class Row:
    """A row and its workgroup; columns come in vectors of `lanes`.

    sums [TOGETHER * threads], scores [entries + 1]: shared memory; scores become shares. Place 0 is
    the stream's, place 1 + s that of entry s.
    """

    op: AttnResNorm
    a: SimpleNamespace
    row: Any
    tid: Any
    threads: int
    lanes: int
    count: Any
    sums: Any
    scores: Any

    def stream(self, at: Any) -> Any:
        """A vector of the stream."""
        return g.let(g.load(self.a.stream, self.row, at, lanes=self.lanes))

    def entry(self, s: Any, at: Any) -> Any:
        """A vector of entry s."""
        return g.let(g.load(self.a.bank, g.wide(s), self.row, at, lanes=self.lanes))

    def columns(self) -> AbstractContextManager[Any]:
        """A loop over the vectors of this thread."""
        return columns(self.op.width, self.lanes, self.tid, self.threads)


@schedule(AttnResNorm, "gpu", "a workgroup per row: scores, mix and norm in one pass each")
def attn_res_norm_gpu(op: AttnResNorm, p: GpuProfile, a: SimpleNamespace) -> None:
    """The mix passes through `out`, of which each thread reads back what it has written."""
    lanes = lanes_for(op.width)
    threads = g.threads_for(p, op.width // lanes, most=MOST_THREADS)
    if op.entries >= threads:
        raise Refusal(f"requires fewer than {threads} entries, got {op.entries}")
    with g.groups(a.n, threads) as (row, tid):
        sums, scores = g.shared(TOGETHER * threads), g.shared(op.entries + 1)
        r = Row(op, a, row, tid, threads, lanes, g.cast(a.count, "int32"), sums, scores)
        _score_stream(r)
        _score_entries(r)
        _softmax(r)
        squares = _mix(r)
        g.store(sums, squares, tid)
        mean = g.sum_of(sums, tid, threads) * g.floats(1.0 / op.width)
        scale = g.let(g.floats(1.0) / T.sqrt(mean + g.floats(op.eps)))
        with columns(op.width, lanes, tid, threads) as at:
            value = normalised(op.act, a.out, a.weight, row, at, scale, lanes)
            g.store(a.out, value, row, at, lanes=lanes)


def _score_stream(r: Row) -> None:
    products, squares = _zeros(r), _zeros(r)
    with r.columns() as at:
        x = r.stream(at)
        _add(r, products, x * g.load(r.a.query, at, lanes=r.lanes))
        _add(r, squares, x * x)
    _join(r, [products, squares])
    mean = g.let(_joined(r, 1) * g.floats(1.0 / r.op.width))
    flag_row(r.a, r.row, mean, r.tid)
    with g.when(r.tid == T.int32(0)):
        inverse = g.floats(1.0) / T.sqrt(mean + g.floats(r.op.eps))
        g.store(r.scores, _joined(r, 0) * inverse, 0)
    g.barrier()


def _score_entries(r: Row) -> None:
    """A few entries at a time; places after the last repeat it and are not used."""
    turns = (r.count + T.int32(TOGETHER - 1)) // T.int32(TOGETHER)
    with g.serial(turns) as turn:
        first = g.let(turn * T.int32(TOGETHER))
        last = g.let(r.count - T.int32(1))
        places = [g.let(T.min(first + T.int32(i), last)) for i in range(TOGETHER)]
        products = [_zeros(r) for _ in places]
        with r.columns() as at:
            entries = [r.entry(s, at) for s in places]
            query = g.let(g.load(r.a.query, at, lanes=r.lanes))
            for product, entry in zip(products, entries, strict=True):
                _add(r, product, entry * query)
        _join(r, products)
        s = g.let(first + r.tid)
        with g.when(T.And(r.tid < T.int32(TOGETHER), s < r.count)):
            score = _joined(r, r.tid) * r.a.inverse_rms[s, r.row]
            g.store(r.scores, score, s + T.int32(1))
        g.barrier()


def _zeros(r: Row) -> Any:
    return g.variable(g.splat(0.0, r.lanes))


def _add(r: Row, cell: Any, value: Any) -> None:
    g.store(cell, g.load(cell, 0, lanes=r.lanes) + value, 0, lanes=r.lanes)


def _join(r: Row, cells: list[Any]) -> None:
    """Sums over the threads, of up to TOGETHER variables at once; `_joined` reads them."""
    for i, cell in enumerate(cells):
        total = sum((cell[k] for k in range(1, r.lanes)), cell[0])
        g.store(r.sums, total, T.int32(i * r.threads) + r.tid)
    half = r.threads // 2
    while half:
        g.barrier()
        with g.when(r.tid < T.int32(half)):
            for i in range(len(cells)):
                at = g.let(T.int32(i * r.threads) + r.tid)
                g.store(r.sums, r.sums[at] + r.sums[at + T.int32(half)], at)
        half //= 2
    g.barrier()


def _joined(r: Row, i: Any) -> Any:
    return g.let(r.sums[g.int32(i) * T.int32(r.threads)])


def _softmax(r: Row) -> None:
    """Scores become shares; with the stream alone its share is exactly one."""
    places = g.let(r.count + T.int32(1))
    top, total = g.variable(r.scores[T.int32(0)]), g.variable(0.0)
    with g.serial(r.count) as s:
        g.put(top, T.max(top[0], r.scores[s + T.int32(1)]))
    own = g.variable(0.0)
    with g.when(r.tid < places):
        g.put(own, f.exp(r.scores[r.tid] - top[0]))
    g.barrier()
    with g.when(r.tid < places):
        g.store(r.scores, own[0], r.tid)
    g.barrier()
    with g.serial(places) as s:
        g.put(total, total[0] + r.scores[s])
    g.barrier()
    with g.when(r.tid < places):
        g.store(r.scores, own[0] / total[0], r.tid)
    g.barrier()


def _mix(r: Row) -> Any:
    """out[row] = the mix, rounded; returns this thread's sum of squares."""
    squares = g.variable(0.0)
    whole = g.let(r.count // T.int32(TOGETHER) * T.int32(TOGETHER))

    def share(place: Any) -> Any:
        return g.splat(g.let(r.scores[place]), r.lanes)

    with r.columns() as at:
        total = g.variable(r.stream(at) * share(T.int32(0)))
        with g.serial(r.count // T.int32(TOGETHER)) as turn:
            first = g.let(turn * T.int32(TOGETHER))
            entries = [r.entry(first + T.int32(i), at) for i in range(TOGETHER)]
            for i, entry in enumerate(entries):
                _add(r, total, entry * share(first + T.int32(i + 1)))
        with g.serial_range(whole, r.count) as s:
            _add(r, total, r.entry(s, at) * share(s + T.int32(1)))
        for i in range(r.lanes):
            value = g.let(g.rounded(r.op.act, g.let(total[i])))
            g.put(total, value, i)
            g.put(squares, squares[0] + value * value)
        g.store(r.a.out, g.load(total, 0, lanes=r.lanes), r.row, at, lanes=r.lanes)
    return squares[0]
