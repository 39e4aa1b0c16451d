"""Absorbed queries and the latent cache into attention outputs: the kernel of `MlaAttention`.

All heads share one cache row per position, so the queries of a sequence are a plain list of
(row, head) pairs. A task takes 16 consecutive pairs, one per vector lane:

    scores   lanes are pairs: the queries are transposed once, cache values are broadcast
    softmax  lanes are pairs: no step crosses lanes
    sum      lanes are columns of the cache row, probabilities are broadcast

Every pair sees the same operations in the same order whatever shares its task: keys come in blocks
of KEYS, blocks in spans of SPAN keys with a softmax of their own, spans are merged in order. So the
result of a row depends on nothing but the row and its past, to the last bit. Keys after a pair's
position are never read into its sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import Isa, TargetProfile

PAIRS = v.LANES
KEYS = 48  # keys of one online-softmax step; their cache rows stay in the second-level cache
SPAN = 10 * KEYS  # keys that one task of a split sequence takes
TAIL = 4  # keys of a score tile where a whole one does not fit
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
class Task:
    """Sixteen pairs of one sequence and their scratch; indices are int64 expressions.

    `few` and `many`: keys that all pairs and that some pair may see. `seen` [16] int32: keys that
    each pair may see. `query` [rank + rope, 16]. `best`, `total` [16]: maximum and sum of the
    softmax. `grow`, `keep` [16]: factors on what is added and on what is there.
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
    query: Any

    @property
    def tile(self) -> Tile:
        """The register tiles of the target."""
        return TILES[self.p.isa]

    def row_head(self, lane: Any) -> tuple[Any, Any]:
        """Row and head of a lane; lanes past the last pair repeat it."""
        pair = v.let(self.pair + T.min(v.int64(lane), self.pairs - 1))
        return pair // self.op.heads, pair % self.op.heads


@dataclass(frozen=True)
class Softmax:
    """Running maximum and sum of 16 softmaxes, and factors [16] for sums made under older maxima."""

    best: Any
    total: Any

    @staticmethod
    def empty() -> Softmax:
        """The softmax of no keys."""
        s = Softmax(v.scratch(PAIRS), v.scratch(PAIRS))
        s.clear()
        return s

    def clear(self) -> None:
        """Forget all keys."""
        v.store(self.best, v.splat(LOWEST), 0)
        v.store(self.total, v.splat(0.0), 0)


def attention(op: MlaAttention, p: TargetProfile, a: SimpleNamespace) -> None:
    """Tasks of 16 pairs in parallel, each over all keys that its pairs may see."""
    blocks = _count_blocks(op, a)
    with v.parallel(blocks) as index:
        task = _task(op, p, a, _balanced(index, blocks))
        _transpose_queries(task)
        total = v.workspace((PAIRS, op.rank))
        softmax = Softmax.empty()
        if op.act == "bfloat16":
            _attend_exact(task, softmax, total)
        else:
            _attend_online(task, softmax, total)
        _write(task, softmax, total)


def _blocks_of(op: MlaAttention, rows: Any) -> Any:
    return (rows * op.heads + (PAIRS - 1)) // PAIRS


def _sequence(a: SimpleNamespace, s: Any) -> list[Any]:
    """slot, first row, rows, position of sequence s."""
    return [v.let(v.cast(a.seqs[s, v.int64(i)], "int64", 1)) for i in range(4)]


def _count_blocks(op: MlaAttention, a: SimpleNamespace) -> Any:
    count = v.scratch(1, "int64")
    v.store(count, T.int64(0), 0, lanes=1)
    with v.serial(a.m) as s:
        _, _, rows, _ = _sequence(a, s)
        v.store(count, count[v.int64(0)] + _blocks_of(op, rows), 0, lanes=1)
    return v.let(count[v.int64(0)])


def _balanced(index: Any, blocks: Any) -> Any:
    """First, last, second, last but one, ...: every run of tasks holds cheap and dear ones."""
    half = v.let(index // 2)
    return v.let(T.Select(index % 2 == T.int64(0), half, blocks - 1 - half))


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
    slot, first, rows, position = _sequence(a, v.let(owner[zero]))
    start = v.let(inside[zero] * PAIRS)
    pairs = v.let(T.min(rows * op.heads - start, T.int64(PAIRS)))
    seen = v.scratch(PAIRS, "int32")
    for lane in range(PAIRS):
        row = (start + T.min(T.int64(lane), pairs - 1)) // op.heads
        v.store(seen, v.cast(position + row + 1, "int32", 1), lane, lanes=1)
    few = v.let(position + start // op.heads + 1)
    many = v.let(position + (start + pairs - 1) // op.heads + 1)
    query = v.workspace((op.rank + op.rope, PAIRS))
    pair = v.let(first * op.heads + start)
    return Task(op, p, a, slot, pair, pairs, few, many, seen, query)


def _transpose_queries(t: Task) -> None:
    op = t.op
    with v.serial(PAIRS) as lane:
        row, head = (v.let(i) for i in t.row_head(lane))
        with v.serial(op.rank) as d:
            v.store(t.query, t.a.absorbed[row, head * op.rank + d], d, lane, lanes=1)
        at = v.let(op.q_offset + head * op.q_stride + op.nope)
        with v.serial(op.rope) as d:
            v.store(t.query, t.a.q[row, at + d], d + op.rank, lane, lanes=1)


def _attend_online(t: Task, softmax: Softmax, total: Any) -> None:
    """float32: one pass over the cache; sums are rescaled when a larger score turns up."""
    scores = v.workspace((KEYS, PAIRS))
    part = v.workspace((PAIRS, t.op.rank))
    span_softmax = Softmax.empty()
    keep, grow = v.scratch(PAIRS), v.scratch(PAIRS)
    _clear(t, total)
    with _spans(t) as span:
        span_softmax.clear()
        _clear(t, part)
        with _blocks(t, span) as block:
            start = v.let(span * SPAN + block * KEYS)
            keys = v.let(T.min(t.many - start, T.int64(KEYS)))
            _scores(t, start, keys, scores, T.int64(0))
            _absorb(t, span_softmax, keys, scores, T.int64(0), keep, shares=True)
            _add_values(t, start, keys, scores, T.int64(0), keep, part)
        _merge_softmax(t, softmax, span_softmax, keep, grow)
        _merge_sums(t, total, part, keep, grow)


def _attend_exact(t: Task, softmax: Softmax, total: Any) -> None:
    """bfloat16: probabilities are rounded, so the softmax is finished before any is used."""
    # As long as the cache: TVM moves an allocation above the binding of `many`.
    scores = v.workspace(((t.a.cap + (KEYS - 1)) // KEYS * KEYS, PAIRS))
    part = v.workspace((PAIRS, t.op.rank))
    span_softmax = Softmax.empty()
    keep, grow = v.scratch(PAIRS), v.scratch(PAIRS)
    with _spans(t) as span:
        span_softmax.clear()
        with _blocks(t, span) as block:
            start = v.let(span * SPAN + block * KEYS)
            keys = v.let(T.min(t.many - start, T.int64(KEYS)))
            _scores(t, start, keys, scores, start)
            _absorb(t, span_softmax, keys, scores, start, keep, shares=False)
        _merge_softmax(t, softmax, span_softmax, keep, grow)
    v.store(keep, v.splat(1.0), 0)
    v.store(grow, v.splat(1.0), 0)
    _clear(t, total)
    with _spans(t) as span:
        _clear(t, part)
        with _blocks(t, span) as block:
            start = v.let(span * SPAN + block * KEYS)
            keys = v.let(T.min(t.many - start, T.int64(KEYS)))
            _round_shares(t, softmax, keys, scores, start)
            _add_values(t, start, keys, scores, start, keep, part)
        _merge_sums(t, total, part, keep, grow)


def _spans(t: Task) -> Any:
    return v.serial((t.many + (SPAN - 1)) // SPAN)


def _blocks(t: Task, span: Any) -> Any:
    keys = T.min(t.many - span * SPAN, T.int64(SPAN))
    return v.serial((keys + (KEYS - 1)) // KEYS)


def _scores(t: Task, start: Any, keys: Any, scores: Any, at: Any) -> None:
    """scores[at + j, pair] of keys start + j, j < keys; -infinity where a pair may not look.

    Whole tiles address the cache with constant strides. Tiles at the end repeat the last key that
    some pair may see, so that nothing beyond it is read.
    """
    whole = v.let(keys // t.tile.keys)
    with v.serial(whole) as i:
        first = v.let(start + i * t.tile.keys)
        indices = [first + j for j in range(t.tile.keys)]
        _score_tile(t, indices, first, scores, at + i * t.tile.keys)
    done = v.let(whole * t.tile.keys)
    with v.serial((keys - done + (TAIL - 1)) // TAIL) as i:
        first = v.let(start + done + i * TAIL)
        indices = [v.let(T.min(first + j, t.many - 1)) for j in range(TAIL)]
        _score_tile(t, indices, first, scores, at + done + i * TAIL)


def _score_tile(t: Task, indices: list[Any], first: Any, scores: Any, at: Any) -> None:
    acc = [v.scratch(PAIRS) for _ in indices]
    for one in acc:
        v.store(one, v.splat(0.0), 0)
    with v.serial(t.op.rank + t.op.rope) as d:
        query = v.let(v.load(t.query, d, 0))
        for one, key in zip(acc, indices, strict=True):
            value = v.splat(t.a.cache[t.slot, key, d])
            v.store(one, v.fma(t.p, value, query, v.load(one, 0)), 0)
    seen = v.let(v.load(t.seen, 0))
    nothing = v.splat(float("-inf"))
    for j, one in enumerate(acc):
        visible = v.splat(v.cast(first + j, "int32", 1)) < seen
        score = v.let(v.load(one, 0) * v.splat(t.op.scale))
        v.store(scores, T.Select(visible, score, nothing), at + j, 0)


def _absorb(
    t: Task, softmax: Softmax, keys: Any, scores: Any, at: Any, keep: Any, shares: bool
) -> None:
    """Take keys into the softmax; `keep` rescales older sums. `shares`: scores become exp(s - max)."""
    best = v.scratch(PAIRS)
    v.store(best, v.load(softmax.best, 0), 0)
    with v.serial(keys) as j:
        larger = v.float_intrinsic("maxnum", PAIRS, v.load(best, 0), v.load(scores, at + j, 0))
        v.store(best, larger, 0)
    scale = f.exp(t.p, v.load(softmax.best, 0) - v.load(best, 0))
    v.store(keep, scale, 0)
    v.store(softmax.total, v.load(softmax.total, 0) * scale, 0)
    v.store(softmax.best, v.load(best, 0), 0)
    with v.serial(keys) as j:
        share = f.exp(t.p, v.load(scores, at + j, 0) - v.load(best, 0))
        v.store(softmax.total, v.load(softmax.total, 0) + share, 0)
        if shares:
            v.store(scores, share, at + j, 0)


def _merge_softmax(t: Task, softmax: Softmax, other: Softmax, keep: Any, grow: Any) -> None:
    """Add the keys of `other`; sums made under either maximum are to be scaled by keep and grow."""
    old, new = v.let(v.load(softmax.best, 0)), v.let(v.load(other.best, 0))
    best = v.let(T.Select(new > old, new, old))
    v.store(keep, f.exp(t.p, old - best), 0)
    v.store(grow, f.exp(t.p, new - best), 0)
    kept = v.let(v.load(softmax.total, 0) * v.load(keep, 0))
    v.store(softmax.total, kept + v.load(other.total, 0) * v.load(grow, 0), 0)
    v.store(softmax.best, best, 0)


def _round_shares(t: Task, softmax: Softmax, keys: Any, scores: Any, at: Any) -> None:
    """Scores become probabilities, rounded to the activation type."""
    best, total = v.let(v.load(softmax.best, 0)), v.let(v.load(softmax.total, 0))
    with v.serial(keys) as j:
        share = f.exp(t.p, v.load(scores, at + j, 0) - best) / total
        v.store(scores, v.rounded(t.op.act, share), at + j, 0)


def _columns(t: Task, vectors: int, emit: Any) -> None:
    """`emit([(at, lanes), ...])` over the columns of the latent, up to `vectors` at a time."""
    wide = vectors * v.LANES
    with v.serial(t.op.rank // wide) as i:
        emit([(i * wide + k * v.LANES, v.LANES) for k in range(vectors)])
    done = t.op.rank // wide * wide
    for at, lanes in v.chunks(t.op.rank - done):
        emit([(done + at, lanes)])


def _clear(t: Task, sums: Any) -> None:
    with v.serial(PAIRS) as pair:
        _columns(t, 1, lambda c: v.store(sums, v.splat(0.0, c[0][1]), pair, c[0][0], lanes=c[0][1]))


def _merge_sums(t: Task, total: Any, part: Any, keep: Any, grow: Any) -> None:
    """total = total * keep + part * grow, per pair."""
    with v.serial(PAIRS) as pair:
        kept, grown = v.let(keep[pair]), v.let(grow[pair])

        def merge(columns: list[tuple[Any, int]]) -> None:
            for at, lanes in columns:
                old = v.let(v.load(total, pair, at, lanes=lanes) * v.splat(kept, lanes))
                new = v.load(part, pair, at, lanes=lanes)
                v.store(total, v.fma(t.p, new, v.splat(grown, lanes), old, lanes), pair, at, lanes=lanes)

        _columns(t, 1, merge)


def _add_values(
    t: Task, start: Any, keys: Any, shares: Any, at: Any, keep: Any, sums: Any
) -> None:
    """sums = sums * keep + shares . cache rows: keys that all pairs see in tiles, then the rest."""
    common = v.let(T.max(T.min(t.few - start, keys), T.int64(0)))
    groups = (t.pairs + (t.tile.pairs - 1)) // t.tile.pairs

    def tile(columns: list[tuple[Any, int]]) -> None:
        with v.serial(groups) as g:
            _value_tile(t, start, common, shares, at, keep, sums, g * t.tile.pairs, columns)

    _columns(t, t.tile.vectors, tile)
    with v.serial_range(common, keys) as j, v.serial(t.pairs) as pair:
        with T.If(start + j < v.cast(t.seen[pair], "int64", 1)), T.Then():
            share = v.let(shares[at + j, pair])

            def add(columns: list[tuple[Any, int]]) -> None:
                for c, lanes in columns:
                    value = v.load(t.a.cache, t.slot, start + j, c, lanes=lanes)
                    old = v.load(sums, pair, c, lanes=lanes)
                    new = v.fma(t.p, value, v.splat(share, lanes), old, lanes)
                    v.store(sums, new, pair, c, lanes=lanes)

            _columns(t, 1, add)


def _value_tile(
    t: Task,
    start: Any,
    keys: Any,
    shares: Any,
    at: Any,
    keep: Any,
    sums: Any,
    pair: Any,
    columns: list[tuple[Any, int]],
) -> None:
    cells = [(r, c, lanes, v.scratch(lanes)) for r in range(t.tile.pairs) for c, lanes in columns]
    for r, c, lanes, one in cells:
        old = v.load(sums, pair + r, c, lanes=lanes) * v.splat(keep[pair + r], lanes)
        v.store(one, old, 0, lanes=lanes)
    with v.serial(keys) as j:
        values = {c: v.let(v.load(t.a.cache, t.slot, start + j, c, lanes=n)) for c, n in columns}
        weights = [v.let(shares[at + j, pair + r]) for r in range(t.tile.pairs)]
        for r, c, lanes, one in cells:
            total = v.load(one, 0, lanes=lanes)
            new = v.fma(t.p, values[c], v.splat(weights[r], lanes), total, lanes)
            v.store(one, new, 0, lanes=lanes)
    for r, c, lanes, one in cells:
        v.store(sums, v.load(one, 0, lanes=lanes), pair + r, c, lanes=lanes)


def _write(t: Task, softmax: Softmax, total: Any) -> None:
    """out = total / sum of the softmax, unless the shares were divided already."""
    with v.serial(t.pairs) as pair:
        row, head = (v.let(i) for i in t.row_head(pair))
        whole = T.float32(1.0) if t.op.act == "bfloat16" else softmax.total[pair]
        whole = v.let(whole)

        def write(columns: list[tuple[Any, int]]) -> None:
            for c, lanes in columns:
                value = v.load(total, pair, c, lanes=lanes) / v.splat(whole, lanes)
                value = v.rounded(t.op.act, value, lanes)
                v.store(t.a.out, value, row, head * t.op.rank + c, lanes=lanes)

        _columns(t, 1, write)
