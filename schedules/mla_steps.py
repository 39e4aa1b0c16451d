"""Steps of a latent attention task: scores, softmax, weighted sum, their merges, the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.mla_tasks import PAIRS, Cells, Task

BEST, SUM = 0, 1  # rows of a softmax [2, 16]: the maximum so far, the sum of exp(score - maximum)
LOWEST = -3.0e38  # below every score, yet finite: exp(LOWEST - LOWEST) is 1, not NaN
TAIL = 4  # keys of a score tile where a whole one does not fit


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


def new_softmax() -> Cells:
    """Room for the running maximum and total of 16 pairs, cleared."""
    softmax = Cells(v.workspace((2, PAIRS)))
    clear_softmax(softmax)
    return softmax


def clear_softmax(softmax: Cells) -> None:
    """A softmax that has seen nothing: maximum minus infinity, total zero."""
    softmax.store(v.splat(LOWEST), BEST, 0)
    softmax.store(v.splat(0.0), SUM, 0)


def score_keys(t: Task, start: Any, keys: Any, scores: Cells, at: Any) -> None:
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


def absorb(
    t: Task, softmax: Cells, keys: Any, scores: Cells, at: Any, keep: Any, shares: bool
) -> None:
    """Take keys into the softmax; `keep` rescales older sums.

    With `shares` the scores become exp(score - maximum).
    """
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


def merge_softmaxes(t: Task, softmax: Cells, other: Cells, factors: Factors) -> None:
    """Add the keys of `other`; `factors` become those of the sums made under the two maxima."""
    old, new = v.opaque(softmax.load(BEST, 0)), v.opaque(other.load(BEST, 0))
    best = v.opaque(T.Select(new > old, new, old))
    keep, grow = f.exp(t.p, old - best), f.exp(t.p, new - best)
    v.store(factors.keep, keep, 0)
    v.store(factors.grow, grow, 0)
    total = v.opaque(softmax.load(SUM, 0) * keep)
    softmax.store(total + other.load(SUM, 0) * grow, SUM, 0)
    softmax.store(best, BEST, 0)


def round_shares(t: Task, softmax: Cells, keys: Any, scores: Cells, at: Any) -> None:
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


def clear_sums(t: Task, sums: Cells) -> None:
    """Set the weighted sums of a task's pairs to zero."""

    def clear(pair: Any, at: Any, lanes: int) -> None:
        sums.store(v.splat(0.0, lanes), pair, at, lanes=lanes)

    _each(t, clear)


def add_sums(t: Task, total: Cells, part: Cells, factors: Factors) -> None:
    """total = total * keep + part * grow, per pair."""

    def merge(pair: Any, at: Any, lanes: int) -> None:
        old = v.opaque(total.load(pair, at, lanes=lanes) * v.splat(factors.keep[pair], lanes))
        new = part.load(pair, at, lanes=lanes)
        grow = v.splat(factors.grow[pair], lanes)
        total.store(v.fma(t.p, new, grow, old, lanes), pair, at, lanes=lanes)

    _each(t, merge)


def add_values(
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


def write_out(t: Task, softmax: Cells, total: Cells) -> None:
    """out = total / sum of the softmax, unless the shares were divided already."""
    divide = t.op.act == "float32"
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
