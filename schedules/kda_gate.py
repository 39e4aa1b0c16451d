"""The two gates around the KDA state: decay and beta before it, norm and output gate after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import GatedRmsNorm, KdaGate
from k3tvm.schedules import functions
from k3tvm.schedules import vector as v
from k3tvm.schedules.numerics import round_to, sigmoid
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.spans import along


@reference(KdaGate)
def kda_gate_reference(op: KdaGate, args: Any) -> dict[str, np.ndarray]:
    """decay [n, heads*dim] and beta [n, heads] in float64, never rounded (specification 3.4)."""
    s = (args.raw.astype(np.float64) + args.dt_bias).reshape(-1, op.heads, op.dim)
    a = args.a.astype(np.float64)[:, None]
    g = -a * np.logaddexp(s, 0.0) if op.lower_bound is None else op.lower_bound * sigmoid(a * s)
    b = args.x[:, op.b_offset : op.b_offset + op.heads].astype(np.float64)
    return {"decay": np.exp(g).reshape(len(s), -1), "beta": sigmoid(b)}


@schedule(KdaGate, "cpu", "one head of one row per task, 16 key channels in vector lanes")
def kda_gate_cpu(op: KdaGate, p: CpuProfile, a: SimpleNamespace) -> None:
    """Rows and heads are independent; everything stays float32."""
    with v.parallel(a.n * v.int64(op.heads)) as task:
        row, head = v.let(task // op.heads), v.let(task % op.heads)
        rate = v.let(a.a[head])

        def piece(at: Any, lanes: int) -> None:
            column = v.let(head * op.dim + at)
            raw = v.load(a.raw, row, column, lanes=lanes)
            s = v.let(raw + v.load(a.dt_bias, column, lanes=lanes))
            decay = functions.exp(p, log_decay(op, p, v.splat(rate, lanes), s, lanes), lanes)
            v.store(a.decay, decay, row, column, lanes=lanes)

        along(op.dim, piece)
        b = v.load(a.x, row, op.b_offset + head, lanes=1)
        v.store(a.beta, functions.sigmoid(p, b, 1), row, head, lanes=1)


def log_decay(op: KdaGate, p: CpuProfile, rate: Any, s: Any, lanes: int) -> Any:
    """g <= 0: the bound selects another activation, it is not a clamp (specification 3.4)."""
    if op.lower_bound is None:
        return v.let(-rate * functions.softplus(p, s, lanes))
    return v.let(v.splat(op.lower_bound, lanes) * functions.sigmoid(p, rate * s, lanes))


@reference(GatedRmsNorm)
def gated_rms_norm_reference(op: GatedRmsNorm, args: Any) -> dict[str, np.ndarray]:
    """o / sqrt(mean(o^2) + eps) * weight * sigmoid(z) per head, rounded once (spec. 3.6b)."""
    o = args.o.astype(np.float64).reshape(-1, op.heads, op.dim)
    z = args.gate[:, op.z_offset : op.z_offset + op.heads * op.dim].astype(np.float64)
    unit = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + op.eps)
    out = (unit * args.weight).reshape(len(o), -1) * sigmoid(z)
    return {"out": round_to(op.act, out)}


@schedule(GatedRmsNorm, "cpu", "one head of one row per task, 16 value channels in vector lanes")
def gated_rms_norm_cpu(op: GatedRmsNorm, p: CpuProfile, a: SimpleNamespace) -> None:
    """Mean square of the head, then norm, weight and gate in one pass; float32 inside."""
    with v.parallel(a.n * v.int64(op.heads)) as task:
        row, head = v.let(task // op.heads), v.let(task % op.heads)
        base = v.let(head * op.dim)
        mean = sum_of_squares(p, a.o, row, base, op.dim) * T.float32(1.0 / op.dim)
        scale = v.let(T.float32(1.0) / v.float_intrinsic("sqrt", 1, mean + T.float32(op.eps)))

        def piece(at: Any, lanes: int) -> None:
            unit = v.load(a.o, row, base + at, lanes=lanes) * v.splat(scale, lanes)
            z = v.load(a.gate, row, op.z_offset + base + at, lanes=lanes)
            gate = functions.sigmoid(p, z, lanes)
            value = unit * v.load(a.weight, at, lanes=lanes) * gate
            v.store(a.out, v.rounded(op.act, value, lanes), row, base + at, lanes=lanes)

        along(op.dim, piece)


def sum_of_squares(p: CpuProfile, x: Any, row: Any, base: Any, width: int) -> Any:
    """sum(x[row, base : base + width]^2): 16 running sums, then their pairwise sum."""
    total = v.scratch(v.LANES)
    tail = v.scratch(1)
    v.store(total, v.splat(0.0), 0)
    v.store(tail, T.float32(0.0), 0, lanes=1)

    def piece(at: Any, lanes: int) -> None:
        x_at = v.let(v.load(x, row, base + at, lanes=lanes))
        if lanes == v.LANES:
            v.store(total, v.fma(p, x_at, x_at, v.load(total, 0)), 0)
        else:
            part = v.reduce_add(v.let(x_at * x_at), lanes)
            v.store(tail, v.load(tail, 0, lanes=1) + part, 0, lanes=1)

    along(width, piece)
    return v.let(v.reduce_add(v.load(total, 0)) + v.load(tail, 0, lanes=1))
