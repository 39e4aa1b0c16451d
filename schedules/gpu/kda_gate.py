"""The two gates around the KDA state on a GPU: decay and beta before it, norm and gate after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import GatedRmsNorm, KdaGate
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule


@schedule(KdaGate, "gpu", "one thread per decay and per beta, neighbours along the row")
def kda_gate_gpu(op: KdaGate, p: GpuProfile, a: SimpleNamespace) -> None:
    """A row has heads*dim decays, then heads betas; everything stays float32."""
    width = op.heads * op.dim
    with g.each(a.n * T.int32(width + op.heads)) as item:
        row = g.let(item // T.int32(width + op.heads))
        column = g.let(item % T.int32(width + op.heads))
        with T.If(column < T.int32(width)):
            with T.Then():
                g.store(a.decay, f.exp(log_decay(op, a, row, column)), row, column)
            with T.Else():
                head = g.let(column - T.int32(width))
                b = a.x[row, head + T.int32(op.b_offset)]
                g.store(a.beta, f.sigmoid(b), row, head)


def log_decay(op: KdaGate, a: SimpleNamespace, row: Any, column: Any) -> Any:
    """g <= 0: the bound selects another activation, it is not a clamp (specification 3.4)."""
    rate = g.let(a.a[column // T.int32(op.dim)])
    s = g.let(a.raw[row, column] + a.dt_bias[column])
    if op.lower_bound is None:
        return g.let(f.softplus(s) * -rate)
    return g.let(f.sigmoid(s * rate) * g.floats(op.lower_bound))


def lanes_of(dim: int) -> int:
    """Values that one load fetches: four where rows keep their alignment."""
    return 4 if dim % 4 == 0 else 1


@schedule(GatedRmsNorm, "gpu", "up to 32 threads per head of a row, several heads per workgroup")
def gated_rms_norm_gpu(op: GatedRmsNorm, p: GpuProfile, a: SimpleNamespace) -> None:
    """Every thread adds up the squares of all threads of its head, in the same order."""
    lanes = lanes_of(op.dim)
    team = 1
    while team < min(32, op.dim // lanes):
        team *= 2
    heads = 256 // team
    total = g.let(a.n * T.int32(op.heads))
    with g.groups((total + T.int32(heads - 1)) // T.int32(heads), 256) as (group, tid):
        squares = g.shared(256)
        local_head, member = g.let(tid // T.int32(team)), g.let(tid % T.int32(team))
        item = g.let(group * T.int32(heads) + local_head)
        row, base = g.let(item // T.int32(op.heads)), g.let(item % T.int32(op.heads) * op.dim)
        own = g.variable(0.0)
        with g.when(item < total), g.strided(member, op.dim // lanes, team) as i:
            x = g.let(g.load(a.o, row, base + i * T.int32(lanes), lanes=lanes))
            for value in [g.lane(x, k) for k in range(lanes)] if lanes > 1 else [x]:
                g.put(own, own[0] + value * value)
        g.store(squares, own[0], tid)
        g.barrier()
        with g.when(item < total):
            sum_of_squares = g.variable(0.0)
            with g.serial(team) as k:
                g.put(sum_of_squares, sum_of_squares[0] + squares[local_head * T.int32(team) + k])
            mean = g.let(sum_of_squares[0] * g.floats(1.0 / op.dim))
            scale = g.let(g.floats(1.0) / T.sqrt(mean + g.floats(op.eps)))
            with g.strided(member, op.dim // lanes, team) as i:
                for k in range(lanes):
                    _gate(op, a, row, base, g.let(i * T.int32(lanes) + T.int32(k)), scale)


def _gate(
    op: GatedRmsNorm, a: SimpleNamespace, row: Any, base: Any, column: Any, scale: Any
) -> None:
    """One value: norm, weight, sigmoid gate, rounded once (specification 3.6b)."""
    unit = a.o[row, base + column] * scale
    gate = f.sigmoid(a.gate[row, base + column + T.int32(op.z_offset)])
    value = g.let(unit * a.weight[column] * gate)
    g.store(a.out, g.rounded(op.act, value), row, base + column)
