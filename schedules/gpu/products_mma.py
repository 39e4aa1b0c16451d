"""Products of a tile of weight rows with a tile of prepared rows of x on CUDA's tensor cores.

Weights are the left operand of mma.m16n8k16, so that rows of x come in steps of 8. A workgroup
copies packed weights and prepared rows (`products_split`) into shared memory, a few steps of 32 k
ahead; each warp decodes the weights of its rows in registers and multiplies.

The sums of one step start from zero, the smallest part of x first, and are added to the float32
total, times the scale of an MXFP4 group: tensor cores truncate where they add, and a short sum has
little to lose. Rows of x that hold bfloat16 values take bfloat16 weights in one part; their sums
stay in the tensor cores all along k. In no case does a result depend on the size of the tile or on
the other rows in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.cores import do, pointer
from k3tvm.schedules.gpu.products import BLOCK
from k3tvm.schedules.gpu.products_mma_plan import COLUMNS, PAD, WARP, Plan
from k3tvm.schedules.gpu.products_mma_weights import FORMS, HALVES, TILES, Lanes
from k3tvm.schedules.gpu.products_split import LANES, RUN_WORDS, STEP_WORDS
from k3tvm.schedules.gpu.products_tile import Finish, Product, Tile

Expr = Any


@dataclass(frozen=True)
class _Work:
    """A thread's part of a tile."""

    plan: Plan
    tile: Tile
    count: Expr | None  # rows of x that there are in the tile, where there may be few
    pool: Any
    at: Lanes
    column: Expr  # first of the warp's fragments of rows of x
    totals: Any

    def places(self, i: int, n: int) -> int:
        """Where the sums of fragment i of the weight and n of x are in `totals`."""
        return (i * self.plan.shape.columns + n) * 4


def product(plan: Plan, count: Expr | None = None) -> Product:
    """A `Product` of tiles in this shape; rows of x past `count` need not be right."""
    return partial(matmul, plan, count)


def matmul(plan: Plan, count: Expr | None, tile: Tile, finish: Finish) -> None:
    """finish(row of the tile, weight row, sum over k of W[weight row, k] * x[row, k]).

    tile.x(row, word, 1) is a word of a prepared row (`products_split.split`).
    """
    with g.resident(plan.shape.resident):
        _matmul(_work(plan, count, tile), finish)


def _matmul(w: _Work, finish: Finish) -> None:
    plan = w.plan
    undo = _row_scales(w) if plan.split.scaled else None
    copy, stages = _copier(w), plan.stages
    for i in range(stages - 1):
        if i < plan.split.steps:
            copy(T.int32(i), T.int32(i))
        do("copies_sent")
    with g.serial(plan.split.steps) as step:
        do("copies_done", T.int32(stages - 2))
        # all have copied this step, and are done with the one whose memory is used next
        g.barrier()
        ahead = g.let(step + T.int32(stages - 1))
        with g.when(ahead < T.int32(plan.split.steps)):
            copy(ahead, g.let(ahead % T.int32(stages)))
        do("copies_sent")
        _multiply(w, g.let(step % T.int32(stages) * T.int32(plan.stage_words)))
    _epilogue(w, undo, finish)


def _work(plan: Plan, count: Expr | None, tile: Tile) -> _Work:
    shape = plan.shape
    pool = g.shared(plan.stages * plan.stage_words, "uint32")
    totals = g.local(TILES * shape.columns * 4)
    for i in range(TILES * shape.columns * 4):
        g.put(totals, g.floats(0.0), i)
    lane, warp = g.let(tile.thread % T.int32(WARP)), g.let(tile.thread // T.int32(WARP))
    down, across = g.let(warp % T.int32(shape.down)), g.let(warp // T.int32(shape.down))
    first = g.let(down * T.int32(shape.warp_rows // BLOCK))
    at = Lanes(first, g.let(lane // T.int32(4)), g.let(lane % T.int32(4)))
    return _Work(plan, tile, count, pool, at, g.let(across * T.int32(shape.columns)), totals)


def _row_scales(w: _Work) -> Any:
    """What undoes the scale of each row of x, in shared memory; the steps' barriers follow."""
    undo = g.shared(w.plan.shape.tokens)
    with g.strided(w.tile.thread, w.plan.shape.tokens, w.plan.shape.threads) as row:
        word = w.tile.x(w.tile.source(row), T.int32(w.plan.split.scale_word), 1)
        g.store(undo, g.bits(word, "float32"), row)
    return undo


def _copier(w: _Work) -> Callable[[Expr, Expr], None]:
    """A function that begins to copy a step into a slot of the pool."""
    tile, plan, threads = w.tile, w.plan, w.plan.shape.threads
    lane, first = g.let(tile.thread % T.int32(LANES)), g.let(tile.thread // T.int32(LANES))
    rows = [g.let(first + T.int32(i)) for i in range(0, plan.shape.tokens, threads // LANES)]
    sources = [tile.source(row) for row in rows]
    blocks = plan.shape.rows // BLOCK
    weights = FORMS[plan.fmt].copies(tile, blocks)

    def copy(step: Expr, slot: Expr) -> None:
        base = g.let(slot * T.int32(plan.stage_words))
        for row, source in zip(rows, sources, strict=True):
            with _while_in(row, plan.shape.tokens, plan.shape.tokens * LANES >= threads):
                _copy_row(w, step, base, lane, row, source)
        for copies in weights:
            for i in range(0, copies.count, threads):
                index = g.let(tile.thread + T.int32(i))
                with _while_in(index, copies.count, i + threads <= copies.count):
                    what, word = copies.one(step, index)
                    _copy(w, base + T.int32(plan.x_words) + word, what)

    return copy


def _copy_row(w: _Work, step: Expr, base: Expr, lane: Expr, row: Expr, source: Any) -> None:
    """This lane's run of every part of a row."""
    run = g.let(lane * T.int32(RUN_WORDS))
    for part in range(w.plan.parts):
        from_ = (step * T.int32(w.plan.split.parts) + T.int32(part)) * T.int32(STEP_WORDS)
        to = (T.int32(part * w.plan.shape.tokens) + row) * T.int32(STEP_WORDS)
        _copy(w, base + to + run, w.tile.x(source, g.let(from_ + run), 1))


def _copy(w: _Work, word: Expr, what: Expr) -> None:
    do("copy16", pointer(w.pool, g.let(word)), T.address_of(what))


def _multiply(w: _Work, base: Expr) -> None:
    """totals += the products of the step at `base`."""
    shape, plan = w.plan.shape, w.plan
    a, b = g.local(TILES * 8, "uint32"), g.local(4, "uint32")
    sums = None if plan.in_place else g.local(TILES * 4)
    form = FORMS[plan.fmt]
    weights = g.let(base + T.int32(plan.x_words))
    scales = form.fragments(w.pool, weights, w.at, shape.rows // BLOCK, a)
    for n in range(shape.columns):
        column = g.let(w.column + T.int32(n))
        with _while_in(column * T.int32(COLUMNS), w.count):
            row = column * T.int32(COLUMNS) + w.at.pick
            at = g.let(base + row * T.int32(STEP_WORDS) + w.at.t * T.int32(RUN_WORDS))
            _column(w, at, a, b, sums, n)
            if sums is not None:
                _add(w, sums, scales, n)


def _column(w: _Work, at: Expr, a: Any, b: Any, sums: Any, n: int) -> None:
    """The products of all fragments of the weight with one of x; small parts of x come first."""
    name = "mma_f16" if w.plan.split.scaled else "mma_bf16"
    into = [(sums, i * 4) if sums is not None else (w.totals, w.places(i, n)) for i in range(TILES)]
    begin = sums is not None
    for part in reversed(range(w.plan.parts)):
        offset = T.int32(part * w.plan.shape.tokens * STEP_WORDS)
        words = T.Bind(g.load(w.pool, at + offset, lanes=4))
        for i in range(4):
            g.put(b, g.lane(words, i), i)
        for half in range(HALVES):
            for i, (cells, place) in enumerate(into):
                fragments = (cells, place), (a, (i * HALVES + half) * 4), (b, half * 2)
                do(f"{name}_new" if begin else name, *(pointer(*f) for f in fragments))
            begin = False


def _add(w: _Work, sums: Any, scales: list[list[Expr]], n: int) -> None:
    """Totals of a column of fragments += sums, times the scales of the weight's rows."""
    for i in range(TILES):
        for j in range(4):
            value = sums[T.int32(i * 4 + j)]
            if scales:
                value = value * scales[i][j // 2]
            place = w.places(i, n) + j
            g.put(w.totals, w.totals[T.int32(place)] + value, place)


def _epilogue(w: _Work, undo: Any, finish: Finish) -> None:
    """finish() for every result, in rounds through shared memory: neighbours get neighbours."""
    shape, plan = w.plan.shape, w.plan
    pitch, columns = shape.rows + PAD, shape.columns // plan.rounds
    per_round = shape.tokens // plan.rounds
    across = g.let(w.column // T.int32(shape.columns))
    for turn in range(plan.rounds):
        g.barrier()
        for n in range(columns):
            _park(w, turn * columns + n, g.let(across * T.int32(columns) + T.int32(n)), pitch)
        g.barrier()
        with g.strided(w.tile.thread, per_round * shape.rows, shape.threads) as i:
            local, row = g.let(i // T.int32(shape.rows)), g.let(i % T.int32(shape.rows))
            value = g.bits(w.pool[local * T.int32(pitch) + row], "float32")
            token = _token(plan, turn, local)
            if undo is not None:
                value = value * undo[token]
            finish(token, g.let(w.tile.first * T.int32(BLOCK) + row), g.let(value))


def _token(plan: Plan, turn: int, local: Expr) -> Expr:
    """The row of x that is number `local` of a round."""
    if plan.rounds == 1:
        return local
    own = plan.shape.columns // plan.rounds * COLUMNS
    warp, inside = local // T.int32(own), local % T.int32(own)
    return g.let(warp * T.int32(plan.shape.columns * COLUMNS) + inside + T.int32(turn * own))


def _park(w: _Work, n: int, place: Expr, pitch: int) -> None:
    """Store the totals of a column of fragments as [row of x][weight row] into the pool."""
    for first, four in FORMS[w.plan.fmt].quads(w.at):
        for odd in range(2):
            values = [w.totals[T.int32(w.places(i, n) + at + odd)] for i, at in four]
            words = [g.bits(value, "uint32") for value in values]
            row = place * T.int32(COLUMNS) + w.at.t * T.int32(2) + T.int32(odd)
            at_word = g.let(row * T.int32(pitch) + first)
            g.store(w.pool, T.Shuffle(words, [0, 1, 2, 3]), at_word, lanes=4)


@contextmanager
def _while_in(i: Expr, limit: Expr | int | None, sure: bool = False) -> Iterator[None]:
    """The body where i < limit, if that is not sure anyway."""
    if limit is None or sure:
        yield
    else:
        with g.when(i < (T.int32(limit) if isinstance(limit, int) else limit)):
            yield
