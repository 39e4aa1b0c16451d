"""Residual attention over the bank, with the RMSNorm that follows, on a GPU: workgroup per row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import AttnResNorm, BankPush
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.norms import flag_row, inverse_rms, normalise
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule


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


@schedule(AttnResNorm, "gpu", "a workgroup per row: scores, mix and norm in one pass each")
def attn_res_norm_gpu(op: AttnResNorm, p: GpuProfile, a: SimpleNamespace) -> None:
    """The mix passes through `out`, of which each thread reads back what it has written."""
    threads = g.threads_for(p, op.width)
    with g.groups(a.n, threads) as (row, tid):
        sums = g.shared(threads)
        shares = g.shared(op.entries + 1)
        count = g.let(g.cast(a.count, "int32"))
        _scores(op, a, row, tid, threads, count, sums, shares)
        _softmax(tid, count, shares)
        squares = _mix(op, a, row, tid, threads, count, shares)
        g.store(sums, squares, tid)
        mean = g.sum_of(sums, tid, threads) * g.floats(1.0 / op.width)
        scale = g.let(g.floats(1.0) / T.sqrt(mean + g.floats(op.eps)))
        normalise(op, a.out, a.weight, a.out, row, scale, tid, threads)


def _scores(
    op: AttnResNorm,
    a: SimpleNamespace,
    row: Any,
    tid: Any,
    threads: int,
    count: Any,
    sums: Any,
    scores: Any,
) -> None:
    """scores[0] is the stream's, scores[1 + s] that of entry s."""
    mean, inverse = inverse_rms(a.stream, row, op.width, op.eps, tid, threads, sums)
    flag_row(a, row, mean, tid)
    dot = g.variable(0.0)
    with g.strided(tid, op.width, threads) as at:
        g.put(dot, dot[0] + a.stream[row, at] * a.query[at])
    _score(dot, inverse, 0, tid, threads, sums, scores)
    with g.serial(count) as s:
        g.put(dot, g.floats(0.0))
        with g.strided(tid, op.width, threads) as at:
            g.put(dot, dot[0] + a.bank[g.wide(s), row, at] * a.query[at])
        _score(dot, a.inverse_rms[s, row], s + T.int32(1), tid, threads, sums, scores)


def _score(dot: Any, inverse: Any, at: Any, tid: Any, threads: int, sums: Any, scores: Any) -> None:
    g.store(sums, dot[0], tid)
    total = g.sum_of(sums, tid, threads)
    with g.when(tid == T.int32(0)):
        g.store(scores, total * inverse, at)


def _softmax(tid: Any, count: Any, scores: Any) -> None:
    """Scores become shares; with the stream alone its share is exactly one."""
    g.barrier()
    with g.when(tid == T.int32(0)):
        top, total = g.variable(scores[T.int32(0)]), g.variable(0.0)
        with g.serial(count) as s:
            g.put(top, T.max(top[0], scores[s + T.int32(1)]))
        with g.serial(count + T.int32(1)) as s:
            share = f.exp(scores[s] - top[0])
            g.store(scores, share, s)
            g.put(total, total[0] + share)
        with g.serial(count + T.int32(1)) as s:
            g.store(scores, g.let(scores[s] / total[0]), s)
    g.barrier()


def _mix(
    op: AttnResNorm, a: SimpleNamespace, row: Any, tid: Any, threads: int, count: Any, shares: Any
) -> Any:
    """out[row] = the mix, rounded; returns this thread's sum of squares."""
    squares = g.variable(0.0)
    with g.strided(tid, op.width, threads) as at:
        total = g.variable(a.stream[row, at] * shares[T.int32(0)])
        with g.serial(count) as s:
            g.put(total, total[0] + a.bank[g.wide(s), row, at] * shares[s + T.int32(1)])
        value = g.let(g.rounded(op.act, g.let(total[0])))
        g.store(a.out, value, row, at)
        g.put(squares, squares[0] + value * value)
    return squares[0]
