"""RMSNorm of the residual stream on a GPU: one workgroup per row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import RmsNorm
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule


def flag_row(a: SimpleNamespace, row: Any, mean_square: Any, thread: Any) -> None:
    """Set health[site, slot of row] when the mean square of a row is not finite (it is rare)."""
    exponent = g.cast(g.bits(mean_square, "uint32") >> T.uint32(23), "int32")
    # squares have no sign, so the exponent is all that is left
    with g.when(T.And(exponent >= T.int32(255), thread == T.int32(0))), g.serial(a.m) as s:
        first, rows = a.seqs[s, 1], a.seqs[s, 2]
        with g.when(T.And(row >= first, row < first + rows)):
            T.buffer_store(a.health, T.int32(1), [a.site, a.seqs[s, 0]])


def inverse_rms(x: Any, row: Any, width: int, eps: float, tid: Any, threads: int, sums: Any) -> Any:
    """(mean square, 1 / sqrt(mean square + eps)) of x[row], the same for every thread."""
    total = g.variable(0.0)
    with g.strided(tid, width, threads) as i:
        value = g.let(x[row, i])
        g.put(total, total[0] + value * value)
    g.store(sums, total[0], tid)
    mean = g.let(g.sum_of(sums, tid, threads) * g.floats(1.0 / width))
    return mean, g.let(g.floats(1.0) / T.sqrt(mean + g.floats(eps)))


@schedule(RmsNorm, "gpu", "a workgroup per row, threads along the width")
def rms_norm_gpu(op: RmsNorm, p: GpuProfile, a: SimpleNamespace) -> None:
    """Mean square, then scale."""
    threads = g.threads_for(p, op.width)
    with g.groups(a.n, threads) as (row, tid):
        sums = g.shared(threads)
        mean, scale = inverse_rms(a.x, row, op.width, op.eps, tid, threads, sums)
        flag_row(a, row, mean, tid)
        normalise(op, a.x, a.weight, a.out, row, scale, tid, threads)


def normalise(
    op: Any, x: Any, weight: Any, out: Any, row: Any, scale: Any, tid: Any, threads: int
) -> None:
    """out[row] = weight * round(x[row] * scale), rounded."""
    with g.strided(tid, op.width, threads) as i:
        unit = g.rounded(op.act, x[row, i] * scale)
        g.store(out, g.rounded(op.act, weight[i] * unit), row, i)
