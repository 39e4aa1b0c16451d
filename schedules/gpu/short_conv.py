"""Short causal convolution of each channel on a GPU, then SiLU; the last inputs become the tail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ShortConv
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule


@schedule(ShortConv, "gpu", "one thread per channel of a sequence: it alone has the tail")
def short_conv_gpu(op: ShortConv, p: GpuProfile, a: SimpleNamespace) -> None:
    """The last inputs slide through registers and are the new tail in the end."""
    with g.each(a.m * T.int32(op.channels)) as item:
        s, channel = g.let(item // T.int32(op.channels)), g.let(item % T.int32(op.channels))
        slot, first, rows = (g.let(a.seqs[s, T.int32(i)]) for i in range(3))
        window = g.local(op.kernel)
        for j in range(op.kernel - 1):
            g.put(window, a.tail[g.wide(slot), T.int32(j), channel], j)
        weights = [g.let(a.weight[T.int32(j), channel]) for j in range(op.kernel)]
        with g.serial(rows) as t:
            g.put(window, a.x[first + t, channel], op.kernel - 1)
            g.store(a.out, _output(op, window, weights), first + t, channel)
            for j in range(op.kernel - 1):
                g.put(window, window[T.int32(j + 1)], j)
        for j in range(op.kernel - 1):
            g.store(a.tail, window[T.int32(j)], g.wide(slot), j, channel)


def _output(op: ShortConv, window: Any, weights: list[Any]) -> Any:
    """SiLU of the weighted sum, oldest input first, rounded."""
    y = g.floats(0.0)
    for j, weight in enumerate(weights):
        y = y + weight * window[T.int32(j)]
    return f.rounded(op.act, f.silu(g.let(y)))
