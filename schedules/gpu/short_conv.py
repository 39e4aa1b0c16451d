"""Short causal convolution of each channel on a GPU, then SiLU; the last inputs become the tail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ShortConv
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.chunks import find_chunk, most_chunks
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule

ROWS = 8  # of a thread when there are many: inputs are read 1.4 times


@schedule(ShortConv, "gpu", "decode: a thread per channel; prompts: a thread per 8 rows of one")
def short_conv_gpu(op: ShortConv, p: GpuProfile, a: SimpleNamespace) -> None:
    """One launch when most sequences have one row; else rows in parallel, then the tails."""
    with T.If(a.n < a.m * T.int32(2)):
        with T.Then():
            _whole_sequences(op, a)
        with T.Else():
            _blocks_of_rows(op, a)
            _new_tails(op, a)


def _whole_sequences(op: ShortConv, a: SimpleNamespace) -> None:
    """A thread alone has a tail: the inputs slide through registers and end as the new tail."""
    with g.each(a.m * T.int32(op.channels)) as item:
        s, channel = g.let(item // T.int32(op.channels)), g.let(item % T.int32(op.channels))
        slot, first, rows = (g.let(a.seqs[s, T.int32(i)]) for i in range(3))
        window = window_of(op, a, slot, first, T.int32(0), channel)
        _rows(op, a, window, first, rows, channel)
        store_tail(op, a, window, slot, channel)


def _blocks_of_rows(op: ShortConv, a: SimpleNamespace) -> None:
    """A thread begins with the inputs before its rows; nobody changes a tail."""
    with g.each(most_chunks(a, ROWS) * T.int32(op.channels)) as item:
        block, channel = g.let(item // T.int32(op.channels)), g.let(item % T.int32(op.channels))
        s, number = find_chunk(a, block, ROWS)
        with g.when(s[0] >= T.int32(0)):
            slot, first, rows = (g.let(a.seqs[s[0], T.int32(i)]) for i in range(3))
            start = g.let(number[0] * T.int32(ROWS))
            window = window_of(op, a, slot, first, start, channel)
            count = g.let(T.min(rows - start, T.int32(ROWS)))
            _rows(op, a, window, g.let(first + start), count, channel)


def _new_tails(op: ShortConv, a: SimpleNamespace) -> None:
    """The last inputs, after all rows have been computed."""
    with g.each(a.m * T.int32(op.channels)) as item:
        s, channel = g.let(item // T.int32(op.channels)), g.let(item % T.int32(op.channels))
        slot, first, rows = (g.let(a.seqs[s, T.int32(i)]) for i in range(3))
        store_tail(op, a, window_of(op, a, slot, first, rows, channel), slot, channel)


def window_of(
    op: ShortConv, a: SimpleNamespace, slot: Any, first: Any, start: Any, channel: Any
) -> Any:
    """The inputs before row `start` of a sequence, oldest first, and room for one more."""
    window = g.local(op.kernel)
    for j in range(op.kernel - 1):
        row = g.let(start + T.int32(j - op.kernel + 1))
        with T.If(row < T.int32(0)):
            with T.Then():
                g.put(window, a.tail[g.wide(slot), row + T.int32(op.kernel - 1), channel], j)
            with T.Else():
                g.put(window, a.x[first + row, channel], j)
    return window


def _rows(
    op: ShortConv, a: SimpleNamespace, window: Any, first: Any, count: Any, channel: Any
) -> None:
    """Outputs of `count` rows; the window moves along."""
    weights = [g.let(a.weight[T.int32(j), channel]) for j in range(op.kernel)]
    with g.serial(count) as t:
        row = g.let(first + t)
        g.put(window, a.x[row, channel], op.kernel - 1)
        y = g.variable(0.0)
        for j, weight in enumerate(weights):  # oldest first
            g.put(y, y[0] + weight * window[T.int32(j)])
        g.store(a.out, g.rounded(op.act, f.silu(y[0])), row, channel)
        for j in range(op.kernel - 1):
            g.put(window, window[T.int32(j + 1)], j)


def store_tail(op: ShortConv, a: SimpleNamespace, window: Any, slot: Any, channel: Any) -> None:
    """The tail is the window; it was read whole before."""
    for j in range(op.kernel - 1):
        g.store(a.tail, window[T.int32(j)], g.wide(slot), j, channel)
