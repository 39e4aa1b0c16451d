"""Latent attention for many rows on CUDA's tensor cores: a workgroup's memory, and its scores.

Queries, keys, probabilities and values are taken apart into bfloat16 parts that are exact in the
activation's format, three for float32; products of parts that are below 2^-24 of the whole are left
out. Queries are prepared once (`products_split`); keys and values are taken apart in shared memory
as they come from the cache, 32 columns or 32 keys at a time.

The same shared memory has, one after the other, parts of queries and keys; scores; parts of
probabilities and of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Activation, MlaAttention
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.cores import do, pointer
from k3tvm.schedules.gpu.mla_tile import KEYS, SCORES, Shape, Tile, shape_of
from k3tvm.schedules.gpu.products_split import (
    LANES,
    PAIRED,
    PARTS,
    RUN,
    RUN_WORDS,
    STEP,
    STEP_WORDS,
    Split,
    parts_of,
    split,
)
from k3tvm.schedules.profile import GpuProfile

Expr = Any

PAIRS, THREADS = 64, 256
DOWN, ACROSS = 2, 4  # warps along the pairs, and along the keys or columns
TILES = PAIRS // DOWN // 16  # fragments of a warp along the pairs
COLUMNS = KEYS // ACROSS // 8  # and along the keys, or along the columns of a slab
SLAB = KEYS  # columns of values in shared memory at a time
GROUPS = KEYS // STEP  # groups of keys in a block
MOST = 256  # columns of the latent whose sums fit into the registers of a workgroup
BUSY = 128  # tiles that keep a large device busy: fewer take the path of few rows
BAD = 0x7F800000  # the exponent of what is not finite
SHAPE = Shape(PAIRS, THREADS, query_lanes=4, lanes=2, columns=1)


@dataclass(frozen=True)
class Cores:
    """Parts of each operand: q of queries, k of the cache, p of probabilities."""

    q: int
    k: int
    p: int


def cores_of(act: Activation) -> Cores:
    """Queries are float32 in every format; the cache and the probabilities are rounded to it."""
    own = PARTS["bfloat16"][act]
    return Cores(PARTS["bfloat16"]["float32"], own, own)


def able(op: MlaAttention, p: GpuProfile) -> bool:
    """Whether a device has tensor cores, and the latent is in whole slabs."""
    whole = op.rank % SLAB == 0 and op.rope % STEP == 0 and op.rank // shares_of(op) <= MOST
    aligned = whole and shape_of(op, p).query_lanes == 4
    return aligned and "tensor_core" in p.features and p.threads >= THREADS


def tiles_of(op: MlaAttention, a: SimpleNamespace) -> Expr:
    """Tiles that are enough for every division of n rows into m sequences."""
    return a.n * T.int32(op.heads) // T.int32(PAIRS) + a.m


def shares_of(op: MlaAttention) -> int:
    """Workgroups that share the columns of a tile, and have its scores each: registers for half."""
    return 2 if op.rank > MOST and op.rank // SLAB % 2 == 0 else 1


def queries(op: MlaAttention, a: SimpleNamespace) -> Any:
    """Emit the launch that takes queries apart: [n, heads, words]."""

    def read(row: Expr, head: Expr, k: Expr, lanes: int) -> Expr:
        cell = g.variable(g.splat(0.0, lanes))
        k = g.let(k)
        with T.If(k < T.int32(op.rank)):
            with T.Then():
                at = head * T.int32(op.rank) + k
                g.store(cell, g.load(a.absorbed, row, at, lanes=lanes), 0, lanes=lanes)
            with T.Else():
                at = head * T.int32(op.q_stride) + T.int32(op.q_offset + op.nope - op.rank) + k
                g.store(cell, g.load(a.q, row, at, lanes=lanes), 0, lanes=lanes)
        return g.load(cell, 0, lanes=lanes)

    return split(_form(op, cores_of(op.act).q), a.n, op.heads, read)


def _form(op: MlaAttention, parts: int) -> Split:
    return Split(op.rank + op.rope, parts, scaled=False, consecutive=True)


def memory_of(op: MlaAttention) -> Any:
    """Shared memory of a workgroup for `mla_tile.tile_of`; `pool` has several uses."""
    c = cores_of(op.act)
    scoring = (2 * c.q * PAIRS + c.k * KEYS) * STEP_WORDS
    weighing = (GROUPS * c.p * PAIRS + c.k * SLAB) * STEP_WORDS

    def make(shape: Shape) -> SimpleNamespace:
        size = max(scoring, weighing, PAIRS * SCORES)
        pool = g.shared(size + RUN * THREADS)
        return SimpleNamespace(
            rows=g.shared(PAIRS, "int32"),
            heads=g.shared(PAIRS, "int32"),
            seen=g.shared(PAIRS, "int32"),
            scores=pool,
            pool=pool,
            raw=size,
            factors=g.shared(PAIRS),
            partial=g.shared(THREADS),
        )

    return make


@dataclass(frozen=True)
class Place:
    """Where a thread is: its warp's first pair, and first key or column; (pick, t) in the warp."""

    pair: Expr
    column: Expr
    pick: Expr
    t: Expr


def place_of(tid: Expr) -> Place:
    """The place of a thread of the workgroup."""
    warp, lane = g.let(tid // T.int32(32)), g.let(tid % T.int32(32))
    pair = g.let(warp % T.int32(DOWN) * T.int32(PAIRS // DOWN))
    column = g.let(warp // T.int32(DOWN) * T.int32(KEYS // ACROSS))
    return Place(pair, column, g.let(lane // T.int32(4)), g.let(lane % T.int32(4)))


def score_keys(t: Tile, prepared: Any, start: Expr) -> None:
    """scores[pair, j] of keys start + j, j < KEYS; -infinity where the pair may not look.

    A key that is not finite gives NaN to all that see it. Places after the last key that some pair
    may see repeat that one, so that nothing beyond it is read.
    """
    c, at = cores_of(t.op.act), place_of(t.tid)
    totals = g.local(TILES * COLUMNS * 4)
    zero(totals, TILES * COLUMNS * 4)
    steps = (t.op.rank + t.op.rope) // STEP
    g.barrier()  # the memory was in use for the block before
    _copy_key(t, start, T.int32(0))
    _copy_queries(t, c, prepared, T.int32(0))
    with g.serial(steps) as step:
        keys = T.int32(2 * c.q * PAIRS * STEP_WORDS)
        run = g.let(t.tid // T.int32(LANES) * T.int32(STEP_WORDS) + at.t * T.int32(RUN_WORDS))
        do("copies_done", T.int32(0))
        fours = [T.Bind(g.load(t.memory.pool, _raw_four(t, i), lanes=4)) for i in range(RUN // 4)]
        key = [_whole_nan(g.let(g.lane(fours[i // 4], i % 4))) for i in PAIRED]
        park(t, key, c.k, keys + run, KEYS)
        g.barrier()
        with g.when(step + T.int32(1) < T.int32(steps)):
            _copy_key(t, start, step + T.int32(1))
            _copy_queries(t, c, prepared, g.let(step + T.int32(1)))
        base = g.let(step % T.int32(2) * T.int32(c.q * PAIRS * STEP_WORDS))
        rights = [g.let(keys + lane_word(at, column(at, n))) for n in range(COLUMNS)]
        multiply(t, at, (c.q, base, PAIRS), (c.k, rights, KEYS), totals, 0)
        g.barrier()
    _store_scores(t, at, start, totals)
    g.barrier()


def _copy_key(t: Tile, start: Expr, step: Expr) -> None:
    """Begin to copy a run: thread 4 j + i has columns 8 i ... 8 i + 7 of key j, for itself."""
    row = g.let(T.min(start + t.tid // T.int32(LANES), t.many - T.int32(1)))
    first = g.let(step * T.int32(STEP) + t.tid % T.int32(LANES) * T.int32(RUN))
    for i in range(RUN // 4):
        source = t.a.cache[g.wide(t.slot), row, first + T.int32(4 * i)]
        do("copy16", pointer(t.memory.pool, _raw_four(t, i)), T.address_of(source))


def _raw_four(t: Tile, i: int) -> Expr:
    """Where four columns of this thread's key are, as they come from the cache."""
    return g.let(T.int32(t.memory.raw + i * THREADS * 4) + t.tid * T.int32(4))


def _copy_queries(t: Tile, c: Cores, prepared: Any, step: Expr) -> None:
    """Begin to copy a step of the prepared queries of all pairs."""
    pair, lane = g.let(t.tid // T.int32(LANES)), g.let(t.tid % T.int32(LANES) * T.int32(RUN_WORDS))
    row, head = g.let(t.memory.rows[pair]), g.let(t.memory.heads[pair])
    for part in range(c.q):
        half = step % T.int32(2) * T.int32(c.q * PAIRS)
        to = (half + T.int32(part * PAIRS) + pair) * T.int32(STEP_WORDS) + lane
        word = (step * T.int32(c.q) + T.int32(part)) * T.int32(STEP_WORDS) + lane
        source = T.address_of(prepared[row, head, g.let(word)])
        do("copy16", pointer(t.memory.pool, g.let(to)), source)
    do("copies_sent")


def _store_scores(t: Tile, at: Place, start: Expr, totals: Any) -> None:
    for i in range(TILES):
        for upper in range(2):
            pair = g.let(at.pair + T.int32(16 * i + 8 * upper) + at.pick)
            seen = g.let(t.memory.seen[pair])
            for n in range(COLUMNS):
                for odd in range(2):
                    key = g.let(at.column + T.int32(8 * n + odd) + at.t * T.int32(2))
                    value = totals[T.int32((i * COLUMNS + n) * 4 + 2 * upper + odd)]
                    score = g.let(value * g.floats(t.op.scale))
                    hidden = g.floats(float("-inf"))
                    shown = T.Select(start + key < seen, score, hidden)
                    g.store(t.memory.scores, shown, pair * T.int32(SCORES) + key)


def _whole_nan(value: Expr) -> Expr:
    """NaN for infinity too: the first part alone would be infinite, and could hide as a zero."""
    u = g.let(g.bits(value, "uint32"))
    quiet = g.let(T.bitwise_or(u, T.uint32(0x00400000)))
    exponent = g.cast(T.bitwise_and(u, T.uint32(BAD)), "int32")
    return g.let(g.bits(T.Select(exponent == T.int32(BAD), quiet, u), "float32"))


def park(t: Tile, values: list[Expr], parts: int, word: Expr, rows: int) -> None:
    """Store the parts of a run of values at `word` of the pool, `rows` rows apart."""
    form = Split(0, parts, scaled=False, consecutive=True)
    for part, words in enumerate(parts_of(form, values)):
        four = T.Shuffle([g.bits(w, "float32") for w in words], list(range(RUN_WORDS)))
        g.store(t.memory.pool, four, g.let(word + T.int32(part * rows * STEP_WORDS)), lanes=4)


def column(at: Place, n: int) -> Expr:
    """The key or column of fragment n that this lane has a run of."""
    return at.column + T.int32(8 * n) + at.pick


def lane_word(at: Place, row: Expr) -> Expr:
    """Where this lane's run of a row begins."""
    return row * T.int32(STEP_WORDS) + at.t * T.int32(RUN_WORDS)


Left = tuple[int, Any, int]  # parts, first word, rows of a part
Right = tuple[int, list[Any], int]  # parts, word of this lane's run in each fragment, rows


def multiply(t: Tile, at: Place, left: Left, right: Right, totals: Any, first: int) -> None:
    """totals[first + ...] += 32 k of pairs times those of keys or columns, small parts first."""
    count = TILES * COLUMNS * 4
    a, b = g.local(TILES * 8, "uint32"), g.local(right[0] * COLUMNS * 4, "uint32")
    sums = g.local(count)
    for part in range(right[0]):
        for n, word in enumerate(right[1]):
            words = _words(t, word + T.int32(part * right[2] * STEP_WORDS))
            _put(b, words, (part * COLUMNS + n) * 4)
    begun = False
    for part in reversed(range(left[0])):
        _load_left(t, at, left, part, a)
        for other in reversed(range(min(right[0], 3 - part))):
            for half in range(2):
                for i in range(TILES):
                    for n in range(COLUMNS):
                        word = "mma_bf16" if begun else "mma_bf16_new"
                        do(
                            word,
                            pointer(sums, (i * COLUMNS + n) * 4),
                            pointer(a, (i * 2 + half) * 4),
                            pointer(b, (other * COLUMNS + n) * 4 + half * 2),
                        )
                begun = True
    for i in range(count):
        g.put(totals, totals[T.int32(first + i)] + sums[T.int32(i)], first + i)


def _load_left(t: Tile, at: Place, left: Left, part: int, a: Any) -> None:
    """The fragments of the warp's pairs: rows pick and pick + 8 of each."""
    for i in range(TILES):
        runs = []
        for upper in range(2):
            row = T.int32(part * left[2] + 16 * i + 8 * upper) + at.pair + at.pick
            runs.append(_words(t, left[1] + lane_word(at, row)))
        for half in range(2):
            words = [runs[upper][2 * half + pair] for pair in range(2) for upper in range(2)]
            _put(a, words, (i * 2 + half) * 4)


def _words(t: Tile, word: Expr) -> list[Expr]:
    four = T.Bind(g.load(t.memory.pool, g.let(word), lanes=4))
    return [g.bits(g.let(g.lane(four, i)), "uint32") for i in range(RUN_WORDS)]


def _put(cells: Any, values: list[Expr], first: int) -> None:
    for i, value in enumerate(values):
        g.put(cells, value, first + i)


def zero(cells: Any, count: int) -> None:
    """Set local floats to zero."""
    for i in range(count):
        g.put(cells, g.floats(0.0), i)
