"""Absorbed queries and the latent cache into attention outputs: the kernel of `MlaAttention`.

All heads share one cache row per position, so the queries of a sequence are a plain list of
(row, head) pairs. A task takes 16 consecutive pairs, one per vector lane:

    scores   lanes are pairs: the queries are transposed once, cache values are broadcast
    softmax  lanes are pairs: no step crosses lanes
    sum      lanes are columns of the cache row, probabilities are broadcast

Every pair sees the same operations in the same order whatever shares its task: keys come in blocks
of KEYS, blocks in spans of SPAN keys with a softmax of their own, spans are merged in order. So the
result of a row depends on nothing but the row and its past, to the last bit. Keys after a pair's
position are never read into its sum. Few long sequences are split: spans become tasks, their sums
are merged in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import Isa, TargetProfile

PAIRS = v.LANES
KEYS = 48  # keys of one online-softmax step; their cache rows stay in the second-level cache
SPAN = 10 * KEYS  # keys with a softmax of their own, and of one task where sequences are split
TAIL = 4  # keys of a score tile where a whole one does not fit
SPLIT_BELOW = 16  # blocks of pairs that keep every thread busy without a split
PARTS = 64  # spans in flight where sequences are split, over all blocks
LOWEST = -3.0e38  # below every score, yet finite: exp(LOWEST - LOWEST) is 1, not NaN


@dataclass(frozen=True)
class Tile:
    """Register tiles: `keys` of the scores; `pairs` x `vectors` of the weighted sum."""

    keys: int
    pairs: int
    vectors: int


TILES: dict[Isa, Tile] = {
    "avx512": Tile(24, 4, 4),
    "avx2": Tile(6, 4, 1),
    "portable": Tile(2, 2, 1),
}


@dataclass(frozen=True)
class Cells:
    """A float32 buffer with its leading indices fixed."""

    buffer: Any
    lead: tuple[Any, ...] = ()

    def load(self, *index: Any, lanes: int = v.LANES) -> Any:
        """`lanes` elements from `index`."""
        return v.load(self.buffer, *self.lead, *index, lanes=lanes)

    def store(self, value: Any, *index: Any, lanes: int = v.LANES) -> None:
        """Store `lanes` elements at `index`."""
        v.store(self.buffer, value, *self.lead, *index, lanes=lanes)


@dataclass(frozen=True)
class Task:
    """Sixteen pairs of one sequence; indices are int64 expressions.

    `pair`: the first pair among all of the call; `pairs`: how many, the other lanes repeat the last.
    `few` and `many`: keys that all pairs and that some pair may see. `seen` [16] int32: keys that
    each pair may see. `query` [rank + rope, 16]: filled by `_with_queries`.
    """

    op: MlaAttention
    p: TargetProfile
    a: SimpleNamespace
    slot: Any
    pair: Any
    pairs: Any
    few: Any
    many: Any
    seen: Any
    query: Any = None

    @property
    def tile(self) -> Tile:
        """The register tiles of the target."""
        return TILES[self.p.isa]

    @property
    def groups(self) -> Any:
        """Tiles of pairs that hold all pairs."""
        return (self.pairs + (self.tile.pairs - 1)) // self.tile.pairs

    def row_head(self, lane: Any) -> tuple[Any, Any]:
        """Row and head of a lane."""
        pair = v.opaque(self.pair + T.min(v.int64(lane), self.pairs - 1))
        return v.opaque(pair // self.op.heads), v.opaque(pair % self.op.heads)


@dataclass(frozen=True)
class Factors:
    """Per pair [16]: `keep` scales a sum that is there, `grow` scales what is added to it."""

    keep: Any
    grow: Any

    @staticmethod
    def ones() -> Factors:
        """Factors that change nothing."""
        factors = Factors(v.scratch(PAIRS), v.scratch(PAIRS))
        v.store(factors.keep, v.splat(1.0), 0)
        v.store(factors.grow, v.splat(1.0), 0)
        return factors


BEST, SUM = 0, 1  # rows of a softmax [2, 16]: the maximum so far, the sum of exp(score - maximum)


def attention(op: MlaAttention, p: TargetProfile, a: SimpleNamespace) -> None:
    """Tasks of 16 pairs in parallel, each over all its keys; few long sequences are split."""
    blocks, longest = _sizes(op, a)
    with T.If(T.And(blocks < v.int64(SPLIT_BELOW), longest > v.int64(SPAN))):
        with T.Then():
            _split_sequences(op, p, a, blocks, (longest + (SPAN - 1)) // SPAN)
        with T.Else():
            _whole_sequences(op, p, a, blocks)


def _whole_sequences(op: MlaAttention, p: TargetProfile, a: SimpleNamespace, blocks: Any) -> None:
    with v.parallel(blocks) as index:
        task = _with_queries(_task(op, p, a, _balanced(index, blocks)))
        total, softmax = Cells(v.workspace((PAIRS, op.rank))), _new_softmax()
        _clear(task, total)
        if op.act == "bfloat16":
            _attend_exact(task, softmax, total)
        else:
            _attend_online(task, softmax, total)
        _write(task, softmax, total)


def _split_sequences(
    op: MlaAttention, p: TargetProfile, a: SimpleNamespace, blocks: Any, spans: Any
) -> None:
    """As many spans at a time as there are parts, then their merge, block by block and in order."""
    at_once = v.opaque(T.min(PARTS // blocks, spans))
    parts = v.workspace((PARTS, PAIRS, op.rank))
    part_softmax = v.workspace((PARTS, 2, PAIRS))
    totals = v.workspace((SPLIT_BELOW, PAIRS, op.rank))
    total_softmax = v.workspace((SPLIT_BELOW, 2, PAIRS))
    with v.serial(blocks) as block:
        _clear_softmax(Cells(total_softmax, (block,)))
        _clear(_task(op, p, a, block), Cells(totals, (block,)))

    def rounds(attend: Callable[..., None], merge: Callable[..., None]) -> None:
        with v.serial((spans + (at_once - 1)) // at_once) as turn:
            with v.parallel(blocks * at_once) as i:
                block, span = v.opaque(i // at_once), v.opaque(turn * at_once + i % at_once)
                task = _task(op, p, a, block)
                with T.If(span * SPAN < task.many), T.Then():
                    whole = Cells(total_softmax, (block,))
                    attend(_with_queries(task), span, Cells(part_softmax, (i,)), Cells(parts, (i,)), whole)
            with v.parallel(blocks) as block:
                task, factors = _task(op, p, a, block), Factors.ones()
                with v.serial(at_once) as k:
                    with T.If((turn * at_once + k) * SPAN < task.many), T.Then():
                        i = v.opaque(block * at_once + k)
                        merge(task, factors, Cells(part_softmax, (i,)), Cells(parts, (i,)), block)

    def online(task: Task, span: Any, softmax: Cells, part: Cells, whole: Cells) -> None:
        _span_online(task, span, softmax, part, Cells(v.workspace((KEYS, PAIRS))))

    def statistics(task: Task, span: Any, softmax: Cells, part: Cells, whole: Cells) -> None:
        _span_statistics(task, span, softmax, Cells(v.workspace((KEYS, PAIRS))), None)

    def exact(task: Task, span: Any, softmax: Cells, part: Cells, whole: Cells) -> None:
        _span_exact(task, span, whole, part, Cells(v.workspace((KEYS, PAIRS))), None)

    def merge_softmax(task: Task, f: Factors, softmax: Cells, part: Cells, block: Any) -> None:
        _merge_softmax(task, Cells(total_softmax, (block,)), softmax, f)

    def merge_sums(task: Task, f: Factors, softmax: Cells, part: Cells, block: Any) -> None:
        _merge_sums(task, Cells(totals, (block,)), part, f)

    def merge_both(*given: Any) -> None:
        merge_softmax(*given)
        merge_sums(*given)

    if op.act == "bfloat16":
        rounds(statistics, merge_softmax)
        rounds(exact, merge_sums)
    else:
        rounds(online, merge_both)
    with v.parallel(blocks) as block:
        _write(_task(op, p, a, block), Cells(total_softmax, (block,)), Cells(totals, (block,)))


def _blocks_of(op: MlaAttention, rows: Any) -> Any:
    return (rows * op.heads + (PAIRS - 1)) // PAIRS


def _sequence(a: SimpleNamespace, s: Any) -> list[Any]:
    """slot, first row, rows, position of sequence s."""
    return [v.opaque(v.cast(a.seqs[s, v.int64(i)], "int64", 1)) for i in range(4)]


def _sizes(op: MlaAttention, a: SimpleNamespace) -> tuple[Any, Any]:
    """Blocks of pairs of all sequences, and the keys of the longest sequence."""
    count, longest = v.scratch(1, "int64"), v.scratch(1, "int64")
    zero = v.int64(0)
    v.store(count, zero, 0, lanes=1)
    v.store(longest, zero, 0, lanes=1)
    with v.serial(a.m) as s:
        _, _, rows, position = _sequence(a, s)
        v.store(count, count[zero] + _blocks_of(op, rows), 0, lanes=1)
        v.store(longest, T.max(longest[zero], position + rows), 0, lanes=1)
    return v.opaque(count[zero]), v.opaque(longest[zero])


def _balanced(index: Any, blocks: Any) -> Any:
    """First, last, second, last but one, ...: every run of tasks holds cheap and dear ones."""
    half = v.opaque(index // 2)
    return v.opaque(T.Select(index % 2 == v.int64(0), half, blocks - 1 - half))


def _task(op: MlaAttention, p: TargetProfile, a: SimpleNamespace, block: Any) -> Task:
    """Find the sequence of a block of pairs and what its pairs may see."""
    left, owner, inside = (v.scratch(1, "int64") for _ in range(3))
    zero = v.int64(0)
    v.store(left, block, 0, lanes=1)
    with v.serial(a.m) as s:
        _, _, rows, _ = _sequence(a, s)
        with T.If(left[zero] >= zero), T.Then():
            v.store(owner, s, 0, lanes=1)
            v.store(inside, left[zero], 0, lanes=1)
        v.store(left, left[zero] - _blocks_of(op, rows), 0, lanes=1)
    slot, first, rows, position = _sequence(a, v.opaque(owner[zero]))
    start = v.opaque(inside[zero] * PAIRS)
    pairs = v.opaque(T.min(rows * op.heads - start, v.int64(PAIRS)))
    seen = v.scratch(PAIRS, "int32")
    with v.serial(PAIRS) as lane:
        row = (start + T.min(lane, pairs - 1)) // op.heads
        v.store(seen, v.cast(position + row + 1, "int32", 1), lane, lanes=1)
    few, many = (v.opaque(v.cast(seen[v.int64(i)], "int64", 1)) for i in (0, PAIRS - 1))
    return Task(op, p, a, slot, v.opaque(first * op.heads + start), pairs, few, many, seen)


def _with_queries(t: Task) -> Task:
    """The task with its absorbed queries and rope parts, transposed."""
    op, a = t.op, t.a
    query = v.workspace((op.rank + op.rope, PAIRS))
    places = v.scratch(3 * PAIRS, "int64")
    with v.serial(PAIRS) as lane:
        row, head = t.row_head(lane)
        v.store(places, row, lane, lanes=1)
        v.store(places, head * op.rank, lane + PAIRS, lanes=1)
        rope = op.q_offset + head * op.q_stride + op.nope
        v.store(places, rope, lane + 2 * PAIRS, lanes=1)
    for source, of, at, width in ((a.absorbed, PAIRS, 0, op.rank), (a.q, 2 * PAIRS, op.rank, op.rope)):
        whole = width // v.LANES
        with v.serial(whole) as i:
            rows = []
            for lane in range(PAIRS):
                first = places[v.int64(of + lane)] + i * v.LANES
                rows.append(v.opaque(v.load(source, places[v.int64(lane)], first)))
            for k, vector in enumerate(v.transpose(rows)):
                v.store(query, vector, at + i * v.LANES + k, 0)
        if width % v.LANES:
            with v.serial(PAIRS) as lane, v.serial_range(whole * v.LANES, width) as d:
                value = source[places[lane], places[of + lane] + d]
                v.store(query, value, at + d, lane, lanes=1)
    return replace(t, query=query)


def _new_softmax() -> Cells:
    softmax = Cells(v.workspace((2, PAIRS)))
    _clear_softmax(softmax)
    return softmax


def _clear_softmax(softmax: Cells) -> None:
    softmax.store(v.splat(LOWEST), BEST, 0)
    softmax.store(v.splat(0.0), SUM, 0)


def _attend_online(t: Task, softmax: Cells, total: Cells) -> None:
    """float32: one pass over the cache; sums are rescaled when a larger score turns up."""
    scores, part = Cells(v.workspace((KEYS, PAIRS))), Cells(v.workspace((PAIRS, t.op.rank)))
    span_softmax, factors = _new_softmax(), Factors.ones()
    with _spans(t) as span:
        _span_online(t, span, span_softmax, part, scores)
        _merge_softmax(t, softmax, span_softmax, factors)
        _merge_sums(t, total, part, factors)


def _attend_exact(t: Task, softmax: Cells, total: Cells) -> None:
    """bfloat16: probabilities are rounded, so the softmax is finished before any is used."""
    # As long as the cache: TVM moves an allocation above the binding of `many`.
    scores = Cells(v.workspace(((t.a.cap + (KEYS - 1)) // KEYS * KEYS, PAIRS)))
    part = Cells(v.workspace((PAIRS, t.op.rank)))
    span_softmax, factors = _new_softmax(), Factors.ones()
    with _spans(t) as span:
        _span_statistics(t, span, span_softmax, scores, span)
        _merge_softmax(t, softmax, span_softmax, factors)
    ones = Factors.ones()
    with _spans(t) as span:
        _span_exact(t, span, softmax, part, scores, span)
        _merge_sums(t, total, part, ones)


def _span_online(t: Task, span: Any, softmax: Cells, part: Cells, scores: Cells) -> None:
    """The softmax and the sum of one span's keys, starting from nothing."""
    keep = v.scratch(PAIRS)
    _clear_softmax(softmax)
    _clear(t, part)
    with _blocks(t, span) as block:
        start, keys = _keys(t, span, block)
        _scores(t, start, keys, scores, v.int64(0))
        _absorb(t, softmax, keys, scores, v.int64(0), keep, shares=True)
        _add_values(t, start, keys, scores, v.int64(0), keep, part)


def _span_statistics(t: Task, span: Any, softmax: Cells, scores: Cells, kept: Any) -> None:
    """The softmax of one span's keys alone; their scores are kept if `kept` is the span."""
    keep = v.scratch(PAIRS)
    _clear_softmax(softmax)
    with _blocks(t, span) as block:
        start, keys = _keys(t, span, block)
        at = v.int64(0) if kept is None else start
        _scores(t, start, keys, scores, at)
        _absorb(t, softmax, keys, scores, at, keep, shares=False)


def _span_exact(
    t: Task, span: Any, softmax: Cells, part: Cells, scores: Cells, kept: Any
) -> None:
    """The sum of one span's keys under the finished softmax; scores come again unless kept."""
    ones = Factors.ones()
    _clear(t, part)
    with _blocks(t, span) as block:
        start, keys = _keys(t, span, block)
        at = v.int64(0) if kept is None else start
        if kept is None:
            _scores(t, start, keys, scores, at)
        _round_shares(t, softmax, keys, scores, at)
        _add_values(t, start, keys, scores, at, ones.keep, part)


def _spans(t: Task) -> Any:
    return v.serial((t.many + (SPAN - 1)) // SPAN)


def _blocks(t: Task, span: Any) -> Any:
    keys = T.min(t.many - span * SPAN, v.int64(SPAN))
    return v.serial((keys + (KEYS - 1)) // KEYS)


def _keys(t: Task, span: Any, block: Any) -> tuple[Any, Any]:
    """First key of a block and how many of it some pair may see."""
    start = v.opaque(span * SPAN + block * KEYS)
    return start, v.opaque(T.min(t.many - start, v.int64(KEYS)))


def _scores(t: Task, start: Any, keys: Any, scores: Cells, at: Any) -> None:
    """scores[at + j, pair] of keys start + j, j < keys; -infinity where a pair may not look.

    Whole tiles address the cache with constant strides. Tiles at the end repeat the last key that
    some pair may see, so that nothing beyond it is read.
    """
    whole = v.opaque(keys // t.tile.keys)
    with v.serial(whole) as i:
        first = v.opaque(start + i * t.tile.keys)
        indices = [first + j for j in range(t.tile.keys)]
        _score_tile(t, indices, first, scores, at + i * t.tile.keys)
    done = v.opaque(whole * t.tile.keys)
    with v.serial((keys - done + (TAIL - 1)) // TAIL) as i:
        first = v.opaque(start + done + i * TAIL)
        indices = [v.opaque(T.min(first + j, t.many - 1)) for j in range(TAIL)]
        _score_tile(t, indices, first, scores, at + done + i * TAIL)


def _score_tile(t: Task, indices: list[Any], first: Any, scores: Cells, at: Any) -> None:
    acc = [v.scratch(PAIRS) for _ in indices]
    for one in acc:
        v.store(one, v.splat(0.0), 0)
    with v.serial(t.op.rank + t.op.rope) as d:
        query = v.opaque(v.load(t.query, d, 0))
        for one, key in zip(acc, indices, strict=True):
            value = v.splat(t.a.cache[t.slot, key, d])
            v.store(one, v.fma(t.p, value, query, v.load(one, 0)), 0)
    seen = v.opaque(v.load(t.seen, 0))
    nothing = v.splat(float("-inf"))
    for j, one in enumerate(acc):
        visible = v.splat(v.cast(first + j, "int32", 1)) < seen
        score = v.opaque(v.load(one, 0) * v.splat(t.op.scale))
        scores.store(T.Select(visible, score, nothing), at + j, 0)


def _absorb(
    t: Task, softmax: Cells, keys: Any, scores: Cells, at: Any, keep: Any, shares: bool
) -> None:
    """Take keys into the softmax; `keep` rescales older sums. `shares`: scores become exp(s - max)."""
    best, total = v.scratch(PAIRS), v.scratch(PAIRS)
    v.store(best, softmax.load(BEST, 0), 0)
    with v.serial(keys) as j:
        larger = v.float_intrinsic("maxnum", PAIRS, v.load(best, 0), scores.load(at + j, 0))
        v.store(best, larger, 0)
    top = v.opaque(v.load(best, 0))
    scale = f.exp(t.p, softmax.load(BEST, 0) - top)
    v.store(keep, scale, 0)
    v.store(total, softmax.load(SUM, 0) * scale, 0)
    with v.serial(keys) as j:
        share = f.exp(t.p, scores.load(at + j, 0) - top)
        v.store(total, v.load(total, 0) + share, 0)
        if shares:
            scores.store(share, at + j, 0)
    softmax.store(top, BEST, 0)
    softmax.store(v.load(total, 0), SUM, 0)


def _merge_softmax(t: Task, softmax: Cells, other: Cells, factors: Factors) -> None:
    """Add the keys of `other`; `factors` become those of the sums made under the two maxima."""
    old, new = v.opaque(softmax.load(BEST, 0)), v.opaque(other.load(BEST, 0))
    best = v.opaque(T.Select(new > old, new, old))
    keep, grow = f.exp(t.p, old - best), f.exp(t.p, new - best)
    v.store(factors.keep, keep, 0)
    v.store(factors.grow, grow, 0)
    total = v.opaque(softmax.load(SUM, 0) * keep)
    softmax.store(total + other.load(SUM, 0) * grow, SUM, 0)
    softmax.store(best, BEST, 0)


def _round_shares(t: Task, softmax: Cells, keys: Any, scores: Cells, at: Any) -> None:
    """Scores become probabilities, rounded to the activation type."""
    best, total = v.opaque(softmax.load(BEST, 0)), v.opaque(softmax.load(SUM, 0))
    with v.serial(keys) as j:
        share = f.exp(t.p, scores.load(at + j, 0) - best) / total
        scores.store(v.rounded(t.op.act, share), at + j, 0)


def _columns(t: Task, vectors: int, emit: Callable[[list[tuple[Any, int]]], None]) -> None:
    """`emit([(at, lanes), ...])` over the columns of the latent, up to `vectors` at a time."""
    wide = vectors * v.LANES
    with v.serial(t.op.rank // wide) as i:
        emit([(i * wide + k * v.LANES, v.LANES) for k in range(vectors)])
    done = t.op.rank // wide * wide
    for at, lanes in v.chunks(t.op.rank - done):
        emit([(done + at, lanes)])


def _each(t: Task, emit: Callable[[Any, Any, int], None]) -> None:
    """`emit(pair, at, lanes)` over all columns of the pairs that the tiles of the task touch."""

    def every(columns: list[tuple[Any, int]]) -> None:
        for at, lanes in columns:
            emit(pair, at, lanes)

    with v.serial(t.groups * t.tile.pairs) as pair:
        _columns(t, 1, every)


def _clear(t: Task, sums: Cells) -> None:
    def clear(pair: Any, at: Any, lanes: int) -> None:
        sums.store(v.splat(0.0, lanes), pair, at, lanes=lanes)

    _each(t, clear)


def _merge_sums(t: Task, total: Cells, part: Cells, factors: Factors) -> None:
    """total = total * keep + part * grow, per pair."""

    def merge(pair: Any, at: Any, lanes: int) -> None:
        old = v.opaque(total.load(pair, at, lanes=lanes) * v.splat(factors.keep[pair], lanes))
        new = part.load(pair, at, lanes=lanes)
        grow = v.splat(factors.grow[pair], lanes)
        total.store(v.fma(t.p, new, grow, old, lanes), pair, at, lanes=lanes)

    _each(t, merge)


def _add_values(
    t: Task, start: Any, keys: Any, shares: Cells, at: Any, keep: Any, sums: Cells
) -> None:
    """sums = sums * keep + shares . cache rows: keys that all pairs see in tiles, then the rest."""
    common = v.opaque(T.max(T.min(t.few - start, keys), v.int64(0)))

    def tile(columns: list[tuple[Any, int]]) -> None:
        with v.serial(t.groups) as g:
            _value_tile(t, start, common, shares, at, keep, sums, g * t.tile.pairs, columns)

    _columns(t, t.tile.vectors, tile)
    with v.serial_range(common, keys) as j, v.serial(t.pairs) as pair:
        with T.If(start + j < v.cast(t.seen[pair], "int64", 1)), T.Then():
            share = v.opaque(shares.load(at + j, pair, lanes=1))

            def add(columns: list[tuple[Any, int]]) -> None:
                for c, lanes in columns:
                    value = v.load(t.a.cache, t.slot, start + j, c, lanes=lanes)
                    old = sums.load(pair, c, lanes=lanes)
                    new = v.fma(t.p, value, v.splat(share, lanes), old, lanes)
                    sums.store(new, pair, c, lanes=lanes)

            _columns(t, 1, add)


def _value_tile(
    t: Task,
    start: Any,
    keys: Any,
    shares: Cells,
    at: Any,
    keep: Any,
    sums: Cells,
    pair: Any,
    columns: list[tuple[Any, int]],
) -> None:
    cells = [(r, c, lanes, v.scratch(lanes)) for r in range(t.tile.pairs) for c, lanes in columns]
    for r, c, lanes, one in cells:
        old = sums.load(pair + r, c, lanes=lanes) * v.splat(keep[pair + r], lanes)
        v.store(one, old, 0, lanes=lanes)
    with v.serial(keys) as j:
        values = [v.opaque(v.load(t.a.cache, t.slot, start + j, c, lanes=n)) for c, n in columns]
        for r in range(t.tile.pairs):
            share = v.opaque(shares.load(at + j, pair + r, lanes=1))
            row = [one for k, _, _, one in cells if k == r]
            for value, (_, lanes), one in zip(values, columns, row, strict=True):
                total = v.load(one, 0, lanes=lanes)
                v.store(one, v.fma(t.p, value, v.splat(share, lanes), total, lanes), 0, lanes=lanes)
    for r, c, lanes, one in cells:
        sums.store(v.load(one, 0, lanes=lanes), pair + r, c, lanes=lanes)


def _write(t: Task, softmax: Cells, total: Cells) -> None:
    """out = total / sum of the softmax, unless the shares were divided already."""
    divide = t.op.act != "bfloat16"
    with v.serial(t.pairs) as pair:
        row, head = t.row_head(pair)
        whole = v.opaque(softmax.load(SUM, pair, lanes=1))

        def write(columns: list[tuple[Any, int]]) -> None:
            for c, lanes in columns:
                value = total.load(pair, c, lanes=lanes)
                value = value / v.splat(whole, lanes) if divide else value
                at = head * t.op.rank + c
                v.store(t.a.out, v.rounded(t.op.act, value, lanes), row, at, lanes=lanes)

        _columns(t, 1, write)
