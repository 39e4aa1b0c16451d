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
from k3tvm.schedules.profile import TargetProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.spans import along, sequence

import os
PF=int(os.environ.get('PF','1'))
CC=os.environ.get('CC')
L2_EPS = 1e-6  # on the sum, inside the root (specification 3.1)

# Columns of the state that one pass keeps sums for: two sums per column must fit the registers.
COLUMNS = {"avx512": 128, "avx2": 32, "portable": 16}
if CC: COLUMNS={k:int(CC) for k in COLUMNS}


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
def kda_step_cpu(op: KdaStep, p: TargetProfile, a: SimpleNamespace) -> None:
    """Heads of one sequence are neighbours in memory and in the order of the tasks."""
    with v.parallel(a.m * v.int64(op.heads)) as task:
        s, head = v.let(task // op.heads), v.let(task % op.heads)
        slot, first, rows = sequence(a.seqs, s)
        token = _Token(*(v.scratch(op.key_dim) for _ in range(4)))
        with v.serial(rows) as i:
            row = v.let(first + i)
            overlap = _prepare(op, p, a, token, row, head)
            tile = min(COLUMNS[p.isa], -(-op.value_dim // v.LANES) * v.LANES)
            whole = op.value_dim // tile
            if whole:
                with v.serial(whole) as c:
                    pieces = v.chunks(tile)
                    _columns(op, p, a, token, overlap, slot, row, head, c * tile, pieces)
            rest = v.chunks(op.value_dim - whole * tile)
            if rest:
                _columns(op, p, a, token, overlap, slot, row, head, whole * tile, rest)


@dataclass(frozen=True)
class _Token:
    """Vectors [key_dim] of one token and head: unit key and query, and both times the decay."""

    key: Any
    query: Any
    decayed_key: Any
    decayed_query: Any


def inverse_norm(p: TargetProfile, x: Any, row: Any, base: Any, width: int) -> Any:
    """1 / sqrt(sum(x[row, base : base + width]^2) + 1e-6) (specification 3.1)."""
    total = sum_of_squares(p, x, row, base, width) + T.float32(L2_EPS)
    return v.let(T.float32(1.0) / v.float_intrinsic("sqrt", 1, total))


def _prepare(
    op: KdaStep, p: TargetProfile, a: SimpleNamespace, token: _Token, row: Any, head: Any
) -> Any:
    """Fill `token`; returns query . key."""
    query_at = v.let(head * op.key_dim)
    key_at = v.let((head + op.heads) * op.key_dim)
    query_scale = inverse_norm(p, a.qkv, row, query_at, op.key_dim) * T.float32(op.key_dim**-0.5)
    key_scale = inverse_norm(p, a.qkv, row, key_at, op.key_dim)
    query_scale = v.let(query_scale)
    overlap = v.scratch(1)
    v.store(overlap, T.float32(0.0), 0, lanes=1)

    def piece(at: Any, lanes: int) -> None:
        query = v.load(a.qkv, row, query_at + at, lanes=lanes) * v.splat(query_scale, lanes)
        key = v.load(a.qkv, row, key_at + at, lanes=lanes) * v.splat(key_scale, lanes)
        query, key = v.let(query), v.let(key)
        decay = v.let(v.load(a.decay, row, query_at + at, lanes=lanes))
        v.store(token.query, query, at, lanes=lanes)
        v.store(token.key, key, at, lanes=lanes)
        v.store(token.decayed_query, query * decay, at, lanes=lanes)
        v.store(token.decayed_key, key * decay, at, lanes=lanes)
        part = v.reduce_add(v.let(query * key), lanes)
        v.store(overlap, v.load(overlap, 0, lanes=1) + part, 0, lanes=1)

    along(op.key_dim, piece)
    return v.let(v.load(overlap, 0, lanes=1))


def _columns(
    op: KdaStep,
    p: TargetProfile,
    a: SimpleNamespace,
    token: _Token,
    overlap: Any,
    slot: Any,
    row: Any,
    head: Any,
    column: Any,
    pieces: list[tuple[int, int]],
) -> None:
    """Read, write and output of the columns in `pieces`, from `column` on.

    The read after the write needs no third pass: q^T S = q^T (diag(decay) S_old) + (q . k) u.
    """
    column = v.let(v.int64(column))
    predicted = [v.scratch(lanes) for _, lanes in pieces]
    read = [v.scratch(lanes) for _, lanes in pieces]
    for (_, lanes), acc in zip(pieces * 2, predicted + read, strict=True):
        v.store(acc, v.splat(0.0, lanes), 0, lanes=lanes)
    share = -(-op.key_dim * op.value_dim // (2 * 16 * op.key_dim * -(-op.value_dim // sum(l for _, l in pieces))))
    base = v.let(column * (2 * op.key_dim * share * 16) // sum(l for _, l in pieces))
    with v.serial(op.key_dim) as d:
        for k in range(share):
            v.prefetch(a.state, slot, head + PF, v.int64(0), base + (d * share + k) * 16)
        key, query = v.let(token.decayed_key[d]), v.let(token.decayed_query[d])
        for (at, lanes), by_key, by_query in zip(pieces, predicted, read, strict=True):
            s = v.let(v.load(a.state, slot, head, d, column + at, lanes=lanes))
            for acc, x in ((by_key, key), (by_query, query)):
                old = v.load(acc, 0, lanes=lanes)
                v.store(acc, v.fma(p, v.splat(x, lanes), s, old, lanes), 0, lanes=lanes)
    writes = []
    beta = v.let(a.beta[row, head])
    value_at = v.let(2 * op.heads * op.key_dim + head * op.value_dim + column)
    for (at, lanes), by_key, by_query in zip(pieces, predicted, read, strict=True):
        value = v.load(a.qkv, row, value_at + at, lanes=lanes)
        write = v.let(v.splat(beta, lanes) * (value - v.load(by_key, 0, lanes=lanes)))
        out = v.fma(p, v.splat(overlap, lanes), write, v.load(by_query, 0, lanes=lanes), lanes)
        at_out = head * op.value_dim + column + at
        v.store(a.out, v.rounded(op.act, out, lanes), row, at_out, lanes=lanes)
        writes.append(write)
    with v.serial(op.key_dim) as d:
        for k in range(share):
            v.prefetch(a.state, slot, head + PF, v.int64(0), base + (op.key_dim * share + d * share + k) * 16)
        decay = v.let(a.decay[row, head * op.key_dim + d])
        key = v.let(token.key[d])
        for (at, lanes), write in zip(pieces, writes, strict=True):
            s = v.load(a.state, slot, head, d, column + at, lanes=lanes)
            kept = v.let(v.splat(decay, lanes) * s)
            new = v.fma(p, v.splat(key, lanes), write, kept, lanes)
            v.store(a.state, new, slot, head, d, column + at, lanes=lanes)
