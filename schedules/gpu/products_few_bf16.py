"""Products of 64 bfloat16 weight rows with up to 16 rows of x on CUDA's tensor cores.

Up to four rows the ordinary product is as fast as its weights can be read; with more it is not. A
warp reads packed weights, 16 bytes a lane, into registers, and pairs neighbouring k: the weights
are read once for all rows of x, and never see shared memory. Rows of x come in parts that are exact
(`products_split`), 8 rows in a fragment. The sums of 32 k start from zero, since tensor cores
truncate where they add.

The warps of a workgroup share k out among them. Sums do not depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.cores import do, pointer
from k3tvm.schedules.gpu.products import BLOCK
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
from k3tvm.schedules.gpu.products_split import (
    LANES,
    RUN,
    RUN_WORDS,
    STEP,
    STEP_WORDS,
    Split,
    split,
)

Expr = Any

TILES = 4  # fragments of 16 weight rows: each load has a row of every one, and that row + 8
ROWS = TILES * BLOCK
COLUMNS = 8  # rows of x in a fragment
MOST = 2  # fragments at a time
LEAST_STEPS = 4  # of a warp, before k is shared out among more
HALVES = 2  # of a step: the 16 k of one product
LOADS = RUN // HALVES  # of a lane in each, of 4 words


def few_bf16(form: Split) -> FewOnCores:
    """Products of bfloat16 weights with rows in this form."""
    threads = WARP * warps_of(form.steps, LEAST_STEPS)
    product = partial(matvec, form)
    return FewOnCores(ROWS, COLUMNS, MOST, threads, partial(split, form), product)


@dataclass(frozen=True)
class _Warp:
    """A thread's place: (pick, t) in its warp, the block and quad of its rows; its registers.

    x: the word where its values of each fragment's row begin.
    """

    strip: Strip
    form: Split
    warp: Expr
    pick: Expr
    t: Expr
    block: Expr
    quad: Expr
    x: list[Expr]
    words: Any
    totals: Any


def matvec(form: Split, strip: Strip, finish: Finish) -> None:
    """finish(i, row, sum over k of W[row, k] * x_i[k]) for all rows of x and of the strip."""
    warps = warps_of(form.steps, LEAST_STEPS)
    me = _place(form, strip)
    with g.resident(1):
        for half in range(HALVES):
            _read(me, me.warp, half)
        share_out(form.steps, warps, me.warp, partial(_multiply, me))
        _finish(me, warps, finish)


def _place(form: Split, strip: Strip) -> _Warp:
    lane, warp = g.let(strip.thread % T.int32(WARP)), g.let(strip.thread // T.int32(WARP))
    pick, t = g.let(lane // T.int32(LANES)), g.let(lane % T.int32(LANES))
    block = g.let(T.min(strip.first + pick // T.int32(2), T.int32(strip.blocks - 1)))
    quad = g.let(pick % T.int32(2) * T.int32(4))
    count = strip.fragments * TILES * 4
    words, totals = g.local(HALVES * LOADS * 4, "uint32"), g.local(count)
    for i in range(count):
        g.put(totals, g.floats(0.0), i)
    x = [
        g.let(strip.row(T.int32(COLUMNS * n) + pick) + t * T.int32(RUN_WORDS))
        for n in range(strip.fragments)
    ]
    return _Warp(strip, form, warp, pick, t, block, quad, x, words, totals)


def _read(me: _Warp, step: Expr, half: int) -> None:
    """Load half a step of the weights; past the end of k its last, x is zero there."""
    w = me.strip.weights
    for i in range(LOADS):
        k = step * T.int32(STEP) + T.int32((half * LOADS + i) * LANES) + me.t
        if w.k % STEP:
            k = T.min(k, T.int32(w.k - 1))
        source = T.address_of(w.data[(*w.lead(me.strip.lead(me.block)), k, me.quad)])
        do("stream16", pointer(me.words, (half * LOADS + i) * 4), source)


def _multiply(me: _Warp, step: Expr, following: Expr | None, even: bool) -> None:
    """totals += a step; its registers take those of the following one."""
    codes = g.local(HALVES * TILES * 4, "uint32")
    for half in range(HALVES):
        for i in range(TILES):
            for j, word in enumerate(_pairs(me.words, half, i)):
                g.put(codes, word, (half * TILES + i) * 4 + j)
        if following is not None:
            with if_sure(following < T.int32(me.form.steps), sure=even):
                _read(me, following, half)
    for n, row in enumerate(me.x):
        with if_sure(me.strip.live(T.int32(COLUMNS * n)), sure=n == 0):
            _add(me, g.let(row + step * T.int32(me.form.parts * STEP_WORDS)), codes, n)


def _pairs(words: Any, half: int, i: int) -> Sequence[Expr]:
    """The fragment of tile i: pairs of k, of the lower row and of the upper."""
    columns = [words[T.int32((half * LOADS + j) * 4 + i)] for j in range(LOADS)]
    return [
        T.call_pure_extern("uint32", f"k3_{which}_halves", *columns[j : j + 2])
        for j in (0, 2)
        for which in ("low", "high")
    ]


def _add(me: _Warp, at: Expr, codes: Any, n: int) -> None:
    """totals of fragment n += the products with the step at word `at` of x, small parts first."""
    sums, b = g.local(TILES * 4), g.local(RUN_WORDS, "uint32")
    begin = "_new"
    for part in reversed(range(me.form.parts)):
        four = T.Bind(me.strip.word(at + T.int32(part * STEP_WORDS), RUN_WORDS))
        for j in range(RUN_WORDS):
            g.put(b, g.lane(four, j), j)
        for half in range(HALVES):
            for i in range(TILES):
                a = pointer(codes, (half * TILES + i) * 4)
                do(f"mma_bf16{begin}", pointer(sums, i * 4), a, pointer(b, half * 2))
            begin = ""
    for i in range(TILES * 4):
        to = n * TILES * 4 + i
        g.put(me.totals, me.totals[T.int32(to)] + sums[T.int32(i)], to)


def _finish(me: _Warp, warps: int, finish: Finish) -> None:
    """Sums over the warps, in their order."""
    strip, tokens = me.strip, me.strip.fragments * COLUMNS
    parts = g.shared(warps * tokens * ROWS)
    first = g.let(me.pick // T.int32(2) * T.int32(BLOCK) + me.quad)
    for n in range(strip.fragments):
        for odd in range(2):
            column = T.int32(n * COLUMNS + odd) + me.t * T.int32(2)
            line = g.let((me.warp * T.int32(tokens) + column) * T.int32(ROWS) + first)
            for upper in range(2):
                places = [(n * TILES + i) * 4 + 2 * upper + odd for i in range(TILES)]
                four = T.Shuffle([me.totals[T.int32(p)] for p in places], list(range(TILES)))
                g.store(parts, four, line + T.int32(8 * upper), lanes=4)
    g.barrier()
    add_up(strip, warps, parts, (warps, tokens, ROWS), finish)
