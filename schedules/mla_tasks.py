"""The rows and heads of a call into tasks: 16 (row, head) pairs, what they see, their queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import CpuProfile, Isa

PAIRS = v.LANES


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

    `pair`: the first pair among all of the call; `pairs`: how many, other lanes repeat the last.
    `few` and `many`: keys that all pairs and that some pair may see. `seen` [16] int32: keys that
    each pair may see. `query` [rank + rope, 16]: filled by `with_queries`.
    """

    op: MlaAttention
    p: CpuProfile
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


def _blocks_of(op: MlaAttention, rows: Any) -> Any:
    return (rows * op.heads + (PAIRS - 1)) // PAIRS


def _sequence(a: SimpleNamespace, s: Any) -> list[Any]:
    """slot, first row, rows, position of sequence s."""
    return [v.opaque(v.cast(a.seqs[s, v.int64(i)], "int64", 1)) for i in range(4)]


def sizes(op: MlaAttention, a: SimpleNamespace) -> tuple[Any, Any]:
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


def balanced(index: Any, blocks: Any) -> Any:
    """First, last, second, last but one, ...: every run of tasks holds cheap and dear ones."""
    half = v.opaque(index // 2)
    return v.opaque(T.Select(index % 2 == v.int64(0), half, blocks - 1 - half))


def task_of(op: MlaAttention, p: CpuProfile, a: SimpleNamespace, block: Any) -> Task:
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


def with_queries(t: Task) -> Task:
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
    for source, of, at, width in (
        (a.absorbed, PAIRS, 0, op.rank),
        (a.q, 2 * PAIRS, op.rank, op.rope),
    ):
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
