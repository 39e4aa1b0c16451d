"""A KDA layer between its projections as one operator: its four parts, one after the other.

What the parts hand on is in temporary memory. On GPUs there is a kernel of its own as well
(`k3tvm.schedules.gpu.kda_fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm.relax_models.operators import KdaStepFused
from k3tvm.schedules import vector as v
from k3tvm.schedules.kda_gate import (
    gated_rms_norm_cpu,
    gated_rms_norm_reference,
    kda_gate_cpu,
    kda_gate_reference,
)
from k3tvm.schedules.kda_step import kda_step_cpu, kda_step_reference
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import Body, reference, schedule
from k3tvm.schedules.short_conv import short_conv_cpu, short_conv_reference


@reference(KdaStepFused)
def kda_step_fused_reference(op: KdaStepFused, args: Any) -> dict[str, np.ndarray]:
    """Float64 inside of each part, rounded between them as the parts are (specification 3.4)."""
    conv = SimpleNamespace(x=args.x, weight=args.taps, seqs=args.seqs, tail=args.tail)
    convolved = short_conv_reference(op.conv, conv)
    gates = SimpleNamespace(raw=args.raw, x=args.write, dt_bias=args.dt_bias, a=args.a)
    step = {"qkv": convolved["out"], "seqs": args.seqs, "state": args.state}
    stepped = kda_step_reference(
        op.step, SimpleNamespace(**step, **kda_gate_reference(op.gates, gates))
    )
    norm = SimpleNamespace(o=stepped["out"], gate=args.gate, weight=args.weight)
    out = gated_rms_norm_reference(op.norm, norm)["out"]
    return {"tail": convolved["tail"], "state": stepped["state"], "out": out}


@dataclass(frozen=True)
class Parts:
    """The schedules of the four parts on one family of targets."""

    conv: Body
    gates: Body
    step: Body
    norm: Body


def run_parts(
    op: KdaStepFused,
    p: Any,
    a: SimpleNamespace,
    parts: Parts,
    workspace: Callable[[Sequence[Any]], Any],
) -> None:
    """The parts one after the other, with `workspace` between them."""
    width = op.heads * op.dim
    qkv, decay = workspace((a.n, 3 * width)), workspace((a.n, width))
    beta, o = workspace((a.n, op.heads)), workspace((a.n, width))
    sizes = {"n": a.n, "m": a.m, "seqs": a.seqs}
    conv = SimpleNamespace(x=a.x, weight=a.taps, tail=a.tail, out=qkv, **sizes)
    parts.conv(op.conv, p, conv)
    gates = {"raw": a.raw, "x": a.write, "dt_bias": a.dt_bias, "a": a.a}
    parts.gates(op.gates, p, SimpleNamespace(decay=decay, beta=beta, **gates, **sizes))
    step = {"qkv": qkv, "decay": decay, "beta": beta, "state": a.state}
    parts.step(op.step, p, SimpleNamespace(out=o, **step, **sizes))
    norm = SimpleNamespace(o=o, gate=a.gate, weight=a.weight, out=a.out, **sizes)
    parts.norm(op.norm, p, norm)


@schedule(KdaStepFused, "cpu", "its four parts one after the other")
def kda_parts_cpu(op: KdaStepFused, p: CpuProfile, a: SimpleNamespace) -> None:
    """Launches cost nothing here, and each part is split over threads in its own way."""
    parts = Parts(short_conv_cpu, kda_gate_cpu, kda_step_cpu, gated_rms_norm_cpu)
    run_parts(op, p, a, parts, v.workspace)
