"""Latent attention: projections into cache rows, queries into outputs, outputs into gated ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention, MlaCache, SigmoidGate
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.elementwise import row_spans
from k3tvm.schedules.mla_attention import attention
from k3tvm.schedules.numerics import round_to, sigmoid
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule


def _rms(op: MlaCache, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    unit = round_to(op.act, x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + op.eps))
    return round_to(op.act, weight * unit)


@reference(MlaCache)
def mla_cache_reference(op: MlaCache, args: Any) -> dict[str, np.ndarray]:
    """Specification 3.6 up to the cache row; k_pe is stored as it is."""
    x = args.x.astype(np.float64)
    latent = x[:, op.kv_offset : op.kv_offset + op.rank]
    rope = x[:, op.kv_offset + op.rank : op.kv_offset + op.rank + op.rope]
    rows = np.concatenate([_rms(op, latent, args.kv_norm), rope], axis=1)
    cache = args.cache.astype(np.float64)
    for slot, first, count, position in args.seqs:
        cache[slot, position : position + count] = rows[first : first + count]
    if not op.q_rank:
        return {"cache": cache, "query": np.full((len(x), 1), np.nan)}
    query = x[:, op.q_offset : op.q_offset + op.q_rank]
    return {"cache": cache, "query": _rms(op, query, args.q_norm)}


@schedule(MlaCache, "cpu", "rows in parallel")
def mla_cache_cpu(op: MlaCache, p: CpuProfile, a: SimpleNamespace) -> None:
    """Each row finds its sequence, then writes its query and its cache row."""
    with v.parallel(a.n) as row:
        if op.q_rank:

            def write_query(value: Any, at: Any, lanes: int) -> None:
                v.store(a.query, value, row, at, lanes=lanes)

            _norm(op, p, a, row, op.q_offset, op.q_rank, a.q_norm, write_query)
        with v.serial(a.m) as s:
            slot, first, count, position = (
                v.let(v.cast(a.seqs[s, v.int64(i)], "int64", 1)) for i in range(4)
            )
            with T.If(T.And(row >= first, row < first + count)), T.Then():
                place = v.let(position + row - first)

                def write_cache(value: Any, at: Any, lanes: int) -> None:
                    v.store(a.cache, value, slot, place, at, lanes=lanes)

                _norm(op, p, a, row, op.kv_offset, op.rank, a.kv_norm, write_cache)
                for at, lanes in v.chunks(op.rope):
                    value = v.load(a.x, row, op.kv_offset + op.rank + at, lanes=lanes)
                    write_cache(value, op.rank + at, lanes)


def _norm(
    op: MlaCache,
    p: CpuProfile,
    a: SimpleNamespace,
    row: Any,
    offset: int,
    width: int,
    weight: Any,
    write: Any,
) -> None:
    """RMSNorm of `width` columns of x from `offset`, given to `write(value, at, lanes)`."""
    whole = width // v.LANES
    tail = [(whole * v.LANES + at, lanes) for at, lanes in v.chunks(width - whole * v.LANES)]

    def x(at: Any, lanes: int) -> Any:
        return v.let(v.load(a.x, row, offset + at, lanes=lanes))

    acc = v.scratch(v.LANES)
    v.store(acc, v.splat(0.0), 0)
    with v.serial(whole) as i:
        value = x(i * v.LANES, v.LANES)
        v.store(acc, v.fma(p, value, value, v.load(acc, 0)), 0)
    total = v.reduce_add(v.let(v.load(acc, 0)))
    for at, lanes in tail:
        value = x(at, lanes)
        total = total + v.reduce_add(v.let(value * value), lanes)
    mean = total * T.float32(1.0 / width)
    scale = v.let(T.float32(1.0) / v.float_intrinsic("sqrt", 1, mean + T.float32(op.eps)))

    def piece(at: Any, lanes: int) -> None:
        unit = v.rounded(op.act, x(at, lanes) * v.splat(scale, lanes), lanes)
        write(v.rounded(op.act, v.load(weight, at, lanes=lanes) * unit, lanes), at, lanes)

    with v.serial(whole) as i:
        piece(i * v.LANES, v.LANES)
    for at, lanes in tail:
        piece(at, lanes)


@reference(MlaAttention)
def mla_attention_reference(op: MlaAttention, args: Any) -> dict[str, np.ndarray]:
    """Row by row and head by head, over the positions up to the row's own."""
    out = np.full((len(args.absorbed), op.heads, op.rank), np.nan)
    absorbed = args.absorbed.astype(np.float64).reshape(out.shape)
    for slot, first, rows, position in args.seqs:
        for row in range(first, first + rows):
            seen = args.cache[slot, : position + row - first + 1].astype(np.float64)
            for head in range(op.heads):
                at = op.q_offset + head * op.q_stride + op.nope
                rope = args.q[row, at : at + op.rope].astype(np.float64)
                score = op.scale * (seen @ np.concatenate([absorbed[row, head], rope]))
                e = np.exp(score - score.max())
                out[row, head] = round_to(op.act, e / e.sum()) @ seen[:, : op.rank]
    return {"out": round_to(op.act, out.reshape(len(out), -1))}


schedule(MlaAttention, "cpu", "16 (row, head) pairs in vector lanes against tiles of cache rows")(
    attention
)


@reference(SigmoidGate)
def sigmoid_gate_reference(op: SigmoidGate, args: Any) -> dict[str, np.ndarray]:
    """The sigmoid is rounded, then the product (specification 3.6b)."""
    z = args.gate[:, op.z_offset : op.z_offset + op.width].astype(np.float64)
    return {"out": round_to(op.act, args.o * round_to(op.act, sigmoid(z)))}


@schedule(SigmoidGate, "cpu", "16 lanes; rows and spans of columns in parallel")
def sigmoid_gate_cpu(op: SigmoidGate, p: CpuProfile, a: SimpleNamespace) -> None:
    """One pass."""

    def piece(row: Any, at: Any, lanes: int) -> None:
        z = v.load(a.gate, row, op.z_offset + at, lanes=lanes)
        gate = v.rounded(op.act, f.sigmoid(p, z, lanes), lanes)
        value = v.rounded(op.act, v.load(a.o, row, at, lanes=lanes) * gate, lanes)
        v.store(a.out, value, row, at, lanes=lanes)

    row_spans(a.n, op.width, piece)
