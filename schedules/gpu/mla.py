"""Latent attention on a GPU: projections into cache rows, queries into outputs, output gate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention, MlaCache, SigmoidGate
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.elementwise import lane_by_lane, lane_of, lanes_for, row_spans
from k3tvm.schedules.gpu.mla_attention import attention
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule

schedule(MlaAttention, "gpu", "tiles of (row, head) pairs against blocks of keys; keys are split")(
    attention
)


@schedule(MlaCache, "gpu", "a workgroup per row and norm")
def mla_cache_gpu(op: MlaCache, p: GpuProfile, a: SimpleNamespace) -> None:
    """Workgroup 2t writes the cache row of row t, workgroup 2t + 1 its query."""
    threads = g.threads_for(p, max(op.rank, op.q_rank))
    norms = 2 if op.q_rank else 1
    with g.groups(a.n * T.int32(norms), threads) as (group, tid):
        sums, owner = g.shared(threads), g.shared(1, "int32")
        row = g.let(group // T.int32(norms))
        with T.If(group % T.int32(norms) == T.int32(0)):
            with T.Then():
                _cache_row(op, a, row, tid, threads, sums, owner)
            if op.q_rank:
                with T.Else():
                    _query_row(op, a, row, tid, threads, sums)


def _cache_row(
    op: MlaCache, a: SimpleNamespace, row: Any, tid: Any, threads: int, sums: Any, owner: Any
) -> None:
    with g.strided(tid, a.m, threads) as s:
        first = g.let(a.seqs[s, 1])
        with g.when(T.And(row >= first, row < first + a.seqs[s, 2])):
            g.store(owner, s, 0)
    # the barriers of the norm make `owner` known to all
    scale = _scale(op, a, row, op.kv_offset, op.rank, tid, threads, sums)
    s = g.let(owner[T.int32(0)])
    slot, place = g.wide(a.seqs[s, 0]), g.let(a.seqs[s, 3] + row - a.seqs[s, 1])
    with g.strided(tid, op.rank, threads) as at:
        value = _normed(op, a, row, op.kv_offset, at, scale, a.kv_norm)
        g.store(a.cache, value, slot, place, at)
    if op.rope:
        with g.strided(tid, op.rope, threads) as at:
            value = a.x[row, T.int32(op.kv_offset + op.rank) + at]
            g.store(a.cache, value, slot, place, T.int32(op.rank) + at)


def _query_row(
    op: MlaCache, a: SimpleNamespace, row: Any, tid: Any, threads: int, sums: Any
) -> None:
    scale = _scale(op, a, row, op.q_offset, op.q_rank, tid, threads, sums)
    with g.strided(tid, op.q_rank, threads) as at:
        g.store(a.query, _normed(op, a, row, op.q_offset, at, scale, a.q_norm), row, at)


def _scale(
    op: MlaCache,
    a: SimpleNamespace,
    row: Any,
    offset: int,
    width: int,
    tid: Any,
    threads: int,
    sums: Any,
) -> Any:
    """1 / sqrt(mean square + eps) of `width` columns of x from `offset`."""
    total = g.variable(0.0)
    with g.strided(tid, width, threads) as at:
        value = g.let(a.x[row, T.int32(offset) + at])
        g.put(total, total[0] + value * value)
    g.store(sums, total[0], tid)
    mean = g.sum_of(sums, tid, threads) * g.floats(1.0 / width)
    return g.let(g.floats(1.0) / T.sqrt(mean + g.floats(op.eps)))


def _normed(
    op: MlaCache, a: SimpleNamespace, row: Any, offset: int, at: Any, scale: Any, weight: Any
) -> Any:
    unit = g.rounded(op.act, g.let(a.x[row, T.int32(offset) + at] * scale))
    return g.rounded(op.act, g.let(weight[at] * unit))


@schedule(SigmoidGate, "gpu", "a thread per four columns")
def sigmoid_gate_gpu(op: SigmoidGate, p: GpuProfile, a: SimpleNamespace) -> None:
    """The sigmoid is rounded, then the product (specification 3.6b)."""
    lanes = lanes_for(op.width, op.z_offset, op.z_width)

    def piece(row: Any, at: Any) -> None:
        o = g.let(g.load(a.o, row, at, lanes=lanes))
        z = g.let(g.load(a.gate, row, T.int32(op.z_offset) + at, lanes=lanes))

        def value(i: int) -> Any:
            gate = g.rounded(op.act, f.sigmoid(lane_of(z, i, lanes)))
            return g.rounded(op.act, g.let(lane_of(o, i, lanes) * gate))

        g.store(a.out, lane_by_lane(lanes, value), row, at, lanes=lanes)

    row_spans(a.n, op.width, lanes, piece)
