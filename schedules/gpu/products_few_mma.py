"""Products of 32 MXFP4 weight rows with a few rows of x on CUDA's integer tensor cores.

A warp reads packed weights, 16 bytes a lane and all neighbours, into the registers from which they
are multiplied; they never see shared memory. Rows of x come as digits (`products_few_digits`): they
are the columns of the product, of which four of the eight are one row, so that a second is free.
The sum over the 32 k that share a scale is exact; it is added to a float32 total, times the scale.

The warps of a workgroup share k out among them. Sums do not depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.cores import do, pointer
from k3tvm.schedules.gpu.products import BLOCK, GROUP
from k3tvm.schedules.gpu.products_few_digits import (
    BATCH,
    DIGITS,
    GROUP_WORDS,
    LANES,
    RUN_WORDS,
    Digits,
    digits_of,
)
from k3tvm.schedules.gpu.products_few_strip import (
    WARP,
    FewOnCores,
    Finish,
    Strip,
    add_up,
    if_sure,
    share_out,
    warps_of,
)

Expr = Any

ROWS = 2 * BLOCK  # weight rows of a strip
PAIR = 2  # rows of x in a fragment
MOST = 4  # fragments at a time
LEAST_BATCHES = 4  # of a warp, before k is shared out among more
WORDS = 4  # of a lane and group: four rows, eight k
SUMS = 8  # of a lane and fragment: four rows, two digits
HALVES = 2  # of the digits of a row of x, which are in two lanes


def few_mxfp4(k: int) -> FewOnCores:
    """Products of MXFP4 weights of width k."""
    form = Digits(k)
    threads = WARP * _warps(form)
    return FewOnCores(ROWS, PAIR, MOST, threads, partial(digits_of, form), matvec)


def _warps(form: Digits) -> int:
    return warps_of(form.padded // BATCH, LEAST_BATCHES)


@dataclass(frozen=True)
class _Registers:
    """What a thread keeps: the table of codes, sums, and of one batch its words and scales."""

    small: Any
    totals: Any
    words: Any
    scales: Any


@dataclass(frozen=True)
class _Warp:
    """A thread's place: (pick, t) in its warp, the block of its four weight rows."""

    strip: Strip
    form: Digits
    registers: _Registers
    warp: Expr
    pick: Expr
    t: Expr
    block: Expr
    digits: list[Expr]  # word of x where its digit of group 0 begins, for each pair
    worth: list[Expr]  # and that of its sums' row

    def group(self, batch: Expr, i: int) -> Expr:
        """Group i of a batch; past the end of k the last one, x is zero there."""
        group = batch * T.int32(BATCH) + T.int32(i)
        if self.form.groups % BATCH:
            group = T.min(group, T.int32(self.form.groups - 1))
        return g.let(group)


def matvec(strip: Strip, finish: Finish) -> None:
    """finish(i, row, sum over k of W[row, k] * x_i[k]) for all rows of x and of the strip."""
    form = Digits(strip.weights.k)
    warps, batches = _warps(form), form.padded // BATCH
    me = _place(strip, form)
    for i in range(BATCH):
        _read(me, me.warp, i)
    share_out(batches, warps, me.warp, partial(_multiply, me))
    _finish(me, warps, finish)


def _place(strip: Strip, form: Digits) -> _Warp:
    small, totals = g.local(2, "uint32"), g.local(strip.fragments * SUMS)
    do("e2m1_table", pointer(small, 0))
    for i in range(strip.fragments * SUMS):
        g.put(totals, g.floats(0.0), i)
    held = g.local(BATCH * WORDS, "uint32"), g.local(BATCH, "uint32")
    lane, warp = g.let(strip.thread % T.int32(WARP)), g.let(strip.thread // T.int32(WARP))
    pick, t = g.let(lane // T.int32(LANES)), g.let(lane % T.int32(LANES))
    block = T.min(strip.first + pick // T.int32(4), T.int32(strip.blocks - 1))
    digit = pick % T.int32(DIGITS) * T.int32(LANES * RUN_WORDS) + t * T.int32(RUN_WORDS)
    digits, worth = [], []
    for pair in range(strip.fragments):
        mine, sums = (T.int32(PAIR * pair) + half for half in (pick // T.int32(4), t // T.int32(2)))
        digits.append(g.let(strip.row(mine) + digit))
        worth.append(g.let(strip.row(sums) + T.int32(form.worth)))
    registers = _Registers(small, totals, *held)
    return _Warp(strip, form, registers, warp, pick, t, g.let(block), digits, worth)


def _read(me: _Warp, batch: Expr, i: int) -> None:
    """Load group i of a batch of the weights: words, and four scales as one word."""
    w, rows = me.strip.weights, me.pick % T.int32(4) * T.int32(4)
    lead, group = me.strip.lead(me.block), me.group(batch, i)
    word = group * T.int32(GROUP // 8) + me.t
    source = T.address_of(w.data[(*w.lead(lead), word, rows)])
    do("stream16", pointer(me.registers.words, i * WORDS), source)
    four = g.load(w.scale, *w.lead(lead, w.scale), group, rows, lanes=4)
    g.put(me.registers.scales, g.bits(four, "uint32"), i)


def _multiply(me: _Warp, batch: Expr, following: Expr | None, even: bool) -> None:
    """totals += a batch; its registers take the following one, if there is one."""
    words, scales = me.registers.words, me.registers.scales
    first = g.let(batch * T.int32(BATCH))
    worths = [g.let(me.strip.word(worth + first, BATCH)) for worth in me.worth]
    for i in range(BATCH):
        codes = g.local(2 * SUMS, "uint32")
        for m in range(2):
            rows = [words[T.int32(i * WORDS + 2 * m + r)] for r in range(2)]
            do("e2m1_bytes", pointer(codes, m * SUMS), pointer(me.registers.small, 0), *rows)
        four = scales[T.int32(i)]
        factors = [
            g.let(T.call_pure_extern("float32", "k3_e8m0", four, T.int32(r))) for r in range(4)
        ]
        if following is not None:
            with if_sure(following * T.int32(BATCH) < T.int32(me.form.padded), sure=even):
                _read(me, following, i)
        for pair, worth in enumerate(worths):
            with if_sure(me.strip.live(T.int32(PAIR * pair)), sure=pair == 0):
                at = g.let(me.digits[pair] + (first + T.int32(i)) * T.int32(GROUP_WORDS))
                value = g.let(g.bits(g.lane(worth, i), "float32"))
                _add(me, at, value, codes, factors, pair * SUMS)


def _add(me: _Warp, at: Expr, worth: Expr, codes: Any, factors: list[Expr], place: int) -> None:
    """totals[place: place + SUMS] += the products with the digits at word `at` of x."""
    totals, b, sums = me.registers.totals, g.local(RUN_WORDS, "uint32"), g.local(SUMS // 2)
    two = T.Bind(me.strip.word(at, RUN_WORDS))
    for j in range(RUN_WORDS):
        g.put(b, g.lane(two, j), j)
    for m in range(2):
        do("e2m1_dots", pointer(sums, 0), pointer(codes, m * SUMS), pointer(b, 0))
        for j in range(SUMS // 2):
            to = place + m * SUMS // 2 + j
            # not worth * factor first: that leaves the range of float32 sooner (this does so when x
            # is 2^121 or more)
            value = sums[T.int32(j)] * worth * factors[2 * m + j // 2]
            g.put(totals, totals[T.int32(to)] + value, to)


def _finish(me: _Warp, warps: int, finish: Finish) -> None:
    """Sums over digits and warps, in the order of the warps, the lower digits of each first."""
    strip = me.strip
    parts = g.shared(warps * HALVES * strip.fragments * PAIR * ROWS)
    # the lower half of the digits is worth 2^-16 of the upper one
    high = me.t % T.int32(2)
    scale = g.let(T.Select(high > T.int32(0), g.floats(1.0), g.floats(2.0**-16)))
    row = me.pick * T.int32(4)
    for pair in range(strip.fragments):
        sums = [me.registers.totals[T.int32(pair * SUMS + i)] for i in range(SUMS)]
        values = [
            g.let((low * g.floats(2.0**-8) + upper) * scale)
            for low, upper in zip(sums[::2], sums[1::2], strict=True)
        ]
        half = (me.warp * T.int32(HALVES) + high) * T.int32(strip.fragments * PAIR)
        line = half + T.int32(PAIR * pair) + me.t // T.int32(2)
        four = T.Shuffle(values, [0, 1, 2, 3])
        g.store(parts, four, g.let(line * T.int32(ROWS) + row), lanes=4)
    g.barrier()
    add_up(strip, warps, parts, (warps * HALVES, strip.fragments * PAIR, ROWS), finish)
