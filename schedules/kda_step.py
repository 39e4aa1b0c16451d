"""The KDA state update token by token: one read and one write pass over the state per token."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk, KdaStep
from k3tvm.schedules import vector as v
from k3tvm.schedules.kda_gate import sum_of_squares
from k3tvm.schedules.numerics import round_to
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.spans import Pieces, along, sequence, tiles

L2_EPS = 1e-6  # on the sum, inside the root (specification 3.1)

# Vectors of 16 state columns that one pass keeps two sums for. Measured on all three instruction
# sets: reading whole rows in the order of memory is worth more than sums that stay in registers.
VECTORS = 8


@reference(KdaStep)
def kda_step_reference(op: KdaStep | KdaChunk, args: Any) -> dict[str, np.ndarray]:
    """The gated delta rule in float64, literally (specification 3.4)."""
    h, k, w = op.heads, op.key_dim, op.value_dim
    n = len(args.qkv)
    rows = args.qkv.astype(np.float64)
    queries = _unit(rows[:, : h * k].reshape(n, h, k)) / np.sqrt(k)
    keys = _unit(rows[:, h * k : 2 * h * k].reshape(n, h, k))
    values = rows[:, 2 * h * k :].reshape(n, h, w)
    decays = args.decay.astype(np.float64).reshape(n, h, k)
    state = args.state.astype(np.float64)
    out = np.full((n, h, w), np.nan)
    for slot, first, count, _ in args.seqs:
        for t in range(first, first + count):
            memory = decays[t][:, :, None] * state[slot]
            predicted = np.einsum("hk,hkv->hv", keys[t], memory)
            write = args.beta[t].astype(np.float64)[:, None] * (values[t] - predicted)
            state[slot] = memory + keys[t][:, :, None] * write[:, None, :]
            out[t] = np.einsum("hk,hkv->hv", queries[t], state[slot])
    return {"state": state, "out": round_to(op.act, out.reshape(n, -1))}


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


@schedule(KdaStep, "cpu", "one head of one sequence per task; the state is read once, updated once")
def kda_step_cpu(op: KdaStep, p: CpuProfile, a: SimpleNamespace) -> None:
    """Heads of one sequence are neighbours in memory and in the order of the tasks."""
    with v.parallel(a.m * v.int64(op.heads)) as task:
        s, head = v.let(task // op.heads), v.let(task % op.heads)
        slot, first, rows = sequence(a.seqs, s)
        vectors = [v.scratch(op.key_dim) for _ in range(4)]
        with v.serial(rows) as i:
            _step(_Token(op, p, a, slot, head, v.let(first + i), *vectors))


@dataclass(frozen=True)
class _Token:
    """One token and head: the arguments, and vectors [key_dim] that `_prepare` fills."""

    op: KdaStep
    p: CpuProfile
    a: SimpleNamespace
    slot: Any
    head: Any
    row: Any
    key: Any  # unit key
    query: Any  # unit query, scaled
    decayed_key: Any
    decayed_query: Any


def _step(t: _Token) -> None:
    overlap = _prepare(t)

    def columns(column: Any, pieces: Pieces) -> None:
        writes = _writes(t, overlap, column, pieces, *_read_state(t, column, pieces))
        _write_state(t, column, pieces, writes)

    tiles(t.op.value_dim, VECTORS, columns)


def inverse_norm(p: CpuProfile, x: Any, row: Any, base: Any, width: int) -> Any:
    """1 / sqrt(sum(x[row, base : base + width]^2) + 1e-6) (specification 3.1)."""
    total = sum_of_squares(p, x, row, base, width) + T.float32(L2_EPS)
    return v.let(T.float32(1.0) / v.float_intrinsic("sqrt", 1, total))


def _prepare(t: _Token) -> Any:
    """Fill the vectors of a token; returns query . key."""
    op, p, qkv = t.op, t.p, t.a.qkv
    query_at = v.let(t.head * op.key_dim)
    key_at = v.let((t.head + op.heads) * op.key_dim)
    query_norm = inverse_norm(p, qkv, t.row, query_at, op.key_dim)
    query_scale = v.let(query_norm * T.float32(op.key_dim**-0.5))
    key_scale = inverse_norm(p, qkv, t.row, key_at, op.key_dim)
    overlap = v.scratch(1)
    v.store(overlap, T.float32(0.0), 0, lanes=1)

    def piece(at: Any, lanes: int) -> None:
        query = v.load(qkv, t.row, query_at + at, lanes=lanes) * v.splat(query_scale, lanes)
        key = v.load(qkv, t.row, key_at + at, lanes=lanes) * v.splat(key_scale, lanes)
        query, key = v.let(query), v.let(key)
        decay = v.let(v.load(t.a.decay, t.row, query_at + at, lanes=lanes))
        v.store(t.query, query, at, lanes=lanes)
        v.store(t.key, key, at, lanes=lanes)
        v.store(t.decayed_query, query * decay, at, lanes=lanes)
        v.store(t.decayed_key, key * decay, at, lanes=lanes)
        part = v.reduce_add(v.let(query * key), lanes)
        v.store(overlap, v.load(overlap, 0, lanes=1) + part, 0, lanes=1)

    along(op.key_dim, piece)
    return v.let(v.load(overlap, 0, lanes=1))


def _read_state(t: _Token, column: Any, pieces: Pieces) -> tuple[list[Any], list[Any]]:
    """Key and query, both decayed, times the old state: one vector per piece each."""
    by_key = [v.scratch(lanes) for _, lanes in pieces]
    by_query = [v.scratch(lanes) for _, lanes in pieces]
    for (_, lanes), acc in zip(pieces * 2, by_key + by_query, strict=True):
        v.store(acc, v.splat(0.0, lanes), 0, lanes=lanes)
    with v.serial(t.op.key_dim) as d:
        key, query = v.let(t.decayed_key[d]), v.let(t.decayed_query[d])
        for (at, lanes), *sums in zip(pieces, by_key, by_query, strict=True):
            s = v.let(v.load(t.a.state, t.slot, t.head, d, column + at, lanes=lanes))
            for acc, x in zip(sums, (key, query), strict=True):
                old = v.load(acc, 0, lanes=lanes)
                v.store(acc, v.fma(t.p, v.splat(x, lanes), s, old, lanes), 0, lanes=lanes)
    return by_key, by_query


def _writes(
    t: _Token, overlap: Any, column: Any, pieces: Pieces, by_key: list[Any], by_query: list[Any]
) -> list[Any]:
    """u = beta (v - prediction); the output too.

    The read after the write needs no third pass: q^T S = q^T (diag(decay) S_old) + (q . k) u.
    """
    op, a = t.op, t.a
    beta = v.let(a.beta[t.row, t.head])
    value_at = v.let(2 * op.heads * op.key_dim + t.head * op.value_dim + column)
    out_at = v.let(t.head * op.value_dim + column)
    writes = []
    for (at, lanes), predicted, read in zip(pieces, by_key, by_query, strict=True):
        value = v.load(a.qkv, t.row, value_at + at, lanes=lanes)
        write = v.let(v.splat(beta, lanes) * (value - v.load(predicted, 0, lanes=lanes)))
        out = v.fma(t.p, v.splat(overlap, lanes), write, v.load(read, 0, lanes=lanes), lanes)
        v.store(a.out, v.rounded(op.act, out, lanes), t.row, out_at + at, lanes=lanes)
        writes.append(write)
    return writes


def _write_state(t: _Token, column: Any, pieces: Pieces, writes: list[Any]) -> None:
    """S = diag(decay) S + key u^T."""
    with v.serial(t.op.key_dim) as d:
        decay = v.let(t.a.decay[t.row, t.head * t.op.key_dim + d])
        key = v.let(t.key[d])
        for (at, lanes), write in zip(pieces, writes, strict=True):
            s = v.load(t.a.state, t.slot, t.head, d, column + at, lanes=lanes)
            kept = v.let(v.splat(decay, lanes) * s)
            new = v.fma(t.p, v.splat(key, lanes), write, kept, lanes)
            v.store(t.a.state, new, t.slot, t.head, d, column + at, lanes=lanes)
