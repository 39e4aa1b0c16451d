"""Residual attention over the bank of earlier streams, with the RMSNorm that always follows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import AttnResNorm, BankPush
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.norms import flag_row, flag_rows, mean_square, normalise
from k3tvm.schedules.numerics import round_to
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule

STRIPES = 4  # independent running sums: as many as hide the latency of an addition


@reference(AttnResNorm)
def attn_res_norm_reference(op: AttnResNorm, args: Any) -> dict[str, np.ndarray]:
    """The mix of specification 3.3 with the inverse norms as given, rounded, then RMSNorm."""
    stream = args.stream.astype(np.float64)
    ms = np.mean(stream * stream, axis=-1)
    sources = np.concatenate([args.bank[: args.count].astype(np.float64), stream[None]])
    inverse = np.concatenate([args.inverse_rms[: args.count], 1 / np.sqrt(ms + op.eps)[None]])
    scores = sources @ args.query.astype(np.float64) * inverse
    p = np.exp(scores - scores.max(axis=0))
    mix = round_to(op.act, np.einsum("st,std->td", p / p.sum(axis=0), sources))
    unit = mix / np.sqrt(np.mean(mix * mix, axis=-1, keepdims=True) + op.eps)
    out = round_to(op.act, args.weight * round_to(op.act, unit))
    health = flag_rows(args.seqs, ~np.isfinite(ms), args.site, args.health)
    return {"out": out, "health": health}


@reference(BankPush)
def bank_push_reference(op: BankPush, args: Any) -> dict[str, np.ndarray]:
    """One entry of the bank and its inverse norms replaced."""
    bank, inverse_rms = args.bank.copy(), args.inverse_rms.astype(np.float64)
    bank[args.count] = args.stream
    ms = np.mean(args.stream.astype(np.float64) ** 2, axis=-1)
    inverse_rms[args.count] = 1 / np.sqrt(ms + op.eps)
    return {"bank": bank, "inverse_rms": inverse_rms}


@schedule(BankPush, "cpu", "rows copied in parallel")
def bank_push_cpu(op: BankPush, p: CpuProfile, a: SimpleNamespace) -> None:
    """One row per iteration: its mean square, then its copy."""
    with v.parallel(a.n) as row:
        ms = mean_square(p, a.stream, row, op.width)
        v.store(a.inverse_rms, _inverse_root(ms, op.eps), a.count, row, lanes=1)

        def copy(at: Any, lanes: int) -> None:
            v.store(a.bank, v.load(a.stream, row, at, lanes=lanes), a.count, row, at, lanes=lanes)

        _along(op.width, copy)


@schedule(AttnResNorm, "cpu", "rows in parallel; scores, mix and norm in one pass each")
def attn_res_norm_cpu(op: AttnResNorm, p: CpuProfile, a: SimpleNamespace) -> None:
    """Three passes over a row: scores of all sources, their mix (into `out`), its norm."""
    with v.parallel(a.n) as row:
        chances = v.scratch(-(-(op.entries + 1) // v.LANES) * v.LANES)
        _scores(op, p, a, row, chances)
        _softmax(p, chances)
        scale = _inverse_root(_mix(op, p, a, row, chances), op.eps)
        normalise(op, a.out, a.weight, a.out, row, scale)


def _inverse_root(mean: Any, eps: float) -> Any:
    return v.let(T.float32(1.0) / v.float_intrinsic("sqrt", 1, mean + T.float32(eps)))


def _along(width: int, piece: Any) -> None:
    """`piece(at, lanes)` over a row: a loop of full vectors, then the tail."""
    whole = width // v.LANES
    with v.serial(whole) as i:
        piece(i * v.LANES, v.LANES)
    for at, lanes in v.chunks(width - whole * v.LANES):
        piece(whole * v.LANES + at, lanes)


def _striped_sums(p: CpuProfile, width: int, factors: Any, sums: int) -> list[Any]:
    """`sums` sums over a row of products; `factors(at, lanes)` gives that many pairs."""
    wide = STRIPES * v.LANES
    acc = [[v.scratch(v.LANES) for _ in range(sums)] for _ in range(STRIPES)]
    for cells in acc:
        for one in cells:
            v.store(one, v.splat(0.0), 0)

    def piece(stripe: int, at: Any) -> None:
        for one, (x, y) in zip(acc[stripe], factors(at, v.LANES), strict=True):
            v.store(one, v.fma(p, x, y, v.load(one, 0)), 0)

    with v.serial(width // wide) as i:
        for stripe in range(STRIPES):
            piece(stripe, i * wide + stripe * v.LANES)
    done = width // wide * wide
    for stripe in range((width - done) // v.LANES):
        piece(stripe, done + stripe * v.LANES)
    totals = [
        v.reduce_add(
            v.let(sum((v.load(acc[s][k], 0) for s in range(1, STRIPES)), v.load(acc[0][k], 0)))
        )
        for k in range(sums)
    ]
    whole = width // v.LANES * v.LANES
    for at, lanes in v.chunks(width - whole):
        for k, (x, y) in enumerate(factors(whole + at, lanes)):
            totals[k] = totals[k] + v.reduce_add(v.let(x * y), lanes)
    return [v.let(total) for total in totals]


def _scores(op: AttnResNorm, p: CpuProfile, a: SimpleNamespace, row: Any, scores: Any) -> None:
    """scores[0] is the stream's, scores[1 + s] that of entry s, -infinity where there is none."""
    for at in range(0, int(scores.shape[0]), v.LANES):
        v.store(scores, v.splat(float("-inf")), at)

    def stream_factors(at: Any, lanes: int) -> list[Any]:
        x = v.let(v.load(a.stream, row, at, lanes=lanes))
        return [(x, v.load(a.query, at, lanes=lanes)), (x, x)]

    dot, squares = _striped_sums(p, op.width, stream_factors, 2)
    mean = v.let(squares * T.float32(1.0 / op.width))
    flag_row(a, row, mean)
    v.store(scores, dot * _inverse_root(mean, op.eps), 0, lanes=1)
    with v.serial(a.count) as s:

        def entry_factors(at: Any, lanes: int) -> list[Any]:
            x = v.load(a.bank, s, row, at, lanes=lanes)
            return [(x, v.load(a.query, at, lanes=lanes))]

        (dot,) = _striped_sums(p, op.width, entry_factors, 1)
        v.store(scores, dot * a.inverse_rms[s, row], s + 1, lanes=1)


def _softmax(p: CpuProfile, scores: Any) -> None:
    """Softmax in place; with the stream alone its share is exactly one."""
    starts = range(0, int(scores.shape[0]), v.LANES)
    top = v.load(scores, 0)
    for at in starts[1:]:
        top = v.float_intrinsic("maxnum", v.LANES, top, v.load(scores, at))
    top = v.splat(v.reduce_max(v.let(top)))
    total = v.splat(0.0)
    for at in starts:
        share = v.let(f.exp(p, v.load(scores, at) - top))
        v.store(scores, share, at)
        total = total + share
    total = v.splat(v.reduce_add(v.let(total)))
    for at in starts:
        v.store(scores, v.load(scores, at) / total, at)


def _mix(op: AttnResNorm, p: CpuProfile, a: SimpleNamespace, row: Any, shares: Any) -> Any:
    """out[row] = the mix, rounded; returns its mean square. The stream comes first in the sum."""
    squares = v.scratch(v.LANES)
    v.store(squares, v.splat(0.0), 0)
    extra = []
    acc = [v.scratch(v.LANES) for _ in range(STRIPES)]

    def block(at: Any, pieces: list[tuple[int, int]]) -> None:
        """Vectors at `at` + offset: all of one entry's before the next entry."""
        kept = list(zip(acc, pieces, strict=False))
        share = v.let(shares[v.int64(0)])
        for one, (offset, lanes) in kept:
            x = v.load(a.stream, row, at + offset, lanes=lanes)
            v.store(one, v.splat(share, lanes) * x, 0, lanes=lanes)
        with v.serial(a.count) as s:
            share = v.let(shares[s + 1])
            for one, (offset, lanes) in kept:
                x = v.load(a.bank, s, row, at + offset, lanes=lanes)
                total = v.load(one, 0, lanes=lanes)
                v.store(one, v.fma(p, v.splat(share, lanes), x, total, lanes), 0, lanes=lanes)
        for one, (offset, lanes) in kept:
            value = v.let(v.rounded(op.act, v.load(one, 0, lanes=lanes), lanes))
            v.store(a.out, value, row, at + offset, lanes=lanes)
            if lanes == v.LANES:
                v.store(squares, v.fma(p, value, value, v.load(squares, 0)), 0)
            else:
                extra.append(v.let(v.reduce_add(v.let(value * value), lanes)))

    wide = STRIPES * v.LANES
    with v.serial(op.width // wide) as i:
        block(i * wide, [(k * v.LANES, v.LANES) for k in range(STRIPES)])
    for offset, lanes in v.chunks(op.width % wide):
        block(op.width // wide * wide, [(offset, lanes)])
    total = v.reduce_add(v.load(squares, 0))
    return v.let(sum(extra, total) * T.float32(1.0 / op.width))
