"""Short causal convolution of each channel, then SiLU; the last inputs stay behind as the tail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ShortConv
from k3tvm.schedules import functions
from k3tvm.schedules import vector as v
from k3tvm.schedules.numerics import round_to, sigmoid
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.spans import along, sequence


@reference(ShortConv)
def short_conv_reference(op: ShortConv, args: Any) -> dict[str, np.ndarray]:
    """Convolution of [tail; x] per sequence in float64 (specification 3.4)."""
    out = np.full((len(args.x), op.channels), np.nan)
    tail = args.tail.copy()
    for slot, first, rows, _ in args.seqs:
        x = args.x[first : first + rows, : op.channels]
        inputs = np.concatenate([tail[slot], x]).astype(np.float64)
        taps = [args.weight[j] * inputs[j : j + rows] for j in range(op.kernel)]
        y = np.sum(taps, axis=0)
        out[first : first + rows] = round_to(op.act, y * sigmoid(y))
        tail[slot] = inputs[rows:]
    return {"tail": tail, "out": out}


def block_width(channels: int) -> int:
    """Channels of one task: a few tasks per thread, rows of 64 bytes to 2 KiB."""
    return max(v.LANES, min(512, channels // 8 // v.LANES * v.LANES))


@schedule(
    ShortConv, "cpu", "blocks of channels in parallel, rows in order: no thread shares a tail"
)
def short_conv_cpu(op: ShortConv, p: CpuProfile, a: SimpleNamespace) -> None:
    """A task owns its channels of all sequences, so it may rewrite their tail when it is done."""
    width = block_width(op.channels)
    whole, rest = divmod(op.channels, width)
    with v.parallel(whole) as block:
        _block(op, p, a, v.let(block * width), width)
    if rest:
        _block(op, p, a, whole * width, rest)


def _block(op: ShortConv, p: CpuProfile, a: SimpleNamespace, channel: Any, width: int) -> None:
    history = op.kernel - 1
    with v.serial(a.m) as s:
        slot, first, rows = sequence(a.seqs, s)
        for t in range(history):  # rows that still look back into the tail
            with T.If(rows > v.int64(t)), T.Then():
                _row(op, p, a, slot, first, t, channel, width)
        with T.If(rows > v.int64(history)), T.Then(), v.serial_range(history, rows) as t:
            _row(op, p, a, slot, first, t, channel, width)
        along(width, lambda at, lanes: _renew(op, a, slot, first, rows, channel + at, lanes))


def _row(
    op: ShortConv,
    p: CpuProfile,
    a: SimpleNamespace,
    slot: Any,
    first: Any,
    t: Any,
    channel: Any,
    width: int,
) -> None:
    """out[first + t] for one block; t is a Python int while taps still reach into the tail."""
    history = op.kernel - 1

    def source(j: int, column: Any, lanes: int) -> Any:
        if isinstance(t, int) and t + j < history:
            return v.load(a.tail, slot, t + j, column, lanes=lanes)
        return v.load(a.x, first + t + (j - history), column, lanes=lanes)

    def piece(at: Any, lanes: int) -> None:
        column = v.let(channel + at)
        y = v.splat(0.0, lanes)
        for j in range(op.kernel):
            weight = v.load(a.weight, j, column, lanes=lanes)
            y = v.let(v.fma(p, weight, source(j, column, lanes), y, lanes))
        value = v.rounded(op.act, functions.silu(p, y, lanes), lanes)
        v.store(a.out, value, first + t, column, lanes=lanes)

    along(width, piece)


def _renew(
    op: ShortConv, a: SimpleNamespace, slot: Any, first: Any, rows: Any, column: Any, lanes: int
) -> None:
    """tail[i] = the input `rows` later; in ascending order an entry is read before it changes."""
    history = op.kernel - 1
    for i in range(history):
        later = v.let(rows + i)
        with T.If(later < v.int64(history)):
            with T.Then():
                v.store(
                    a.tail,
                    v.load(a.tail, slot, later, column, lanes=lanes),
                    slot,
                    i,
                    column,
                    lanes=lanes,
                )
            with T.Else():
                x = v.load(a.x, first + later - history, column, lanes=lanes)
                v.store(a.tail, x, slot, i, column, lanes=lanes)
