"""Keys, queries and decays of a KDA chunk become tensor-core operands in shared memory.

A thread has two neighbouring channels and eight of the 16 rows. It reads them into registers, which
may happen long before they are needed, and stores them, normalised and times the running products
of the decays, as pairs of float16: a high part and the rest (see `k3tvm.schedules.gpu.kda_mma`).
Everything here is at most one, so one power of two brings all of it into the range of float16.

Where it goes is decided by who reads it: the 16 bytes of a lane lie together, two high parts and
two rests, and the lanes of a load meet in no bank. Row 4t + 2h + e of a chunk is column 2t + e of
the h-th fragment of eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.kda_pairs import ROW_KEY, ROWS

THREADS = 128
HALF = ROWS // 2
PITCH = 32 * 4 + 16  # words of a fragment of the mixed rows; the next one begins in other banks
SCALE = 2.0**14  # float16 ends at 2^16
MOST_KEYS = THREADS  # two channels a thread, and two threads a channel


@dataclass(frozen=True)
class Stage:
    """What one thread reads of a chunk, and where the workgroup keeps the operands."""

    op: KdaChunk
    a: SimpleNamespace
    pairs_of: Any  # device memory from `pair_launch`
    head: Any
    pair: Any  # of channels
    half: Any  # of rows
    key: Any  # registers [8, 2], as the next two
    query: Any
    decay: Any
    factor: Any  # register: what makes a unit of one of the warp's keys and queries
    lane: Any  # which one: row lane % 8, a query from lane 8 on
    mixed: Any  # shared [4 fragments of rows, steps, PITCH]: A_i k_i, A_i q_i
    late: Any  # shared [fragments of channels, 128]: (A_last / A_j) k_j
    total: Any  # shared [keys]: A_last
    halves: Any  # shared [2, keys]: products of the decays of each half of the rows

    @classmethod
    def with_buffers(
        cls, op: KdaChunk, a: SimpleNamespace, pairs_of: Any, head: Any, tid: Any
    ) -> Stage:
        """Declare the memory."""
        keys = padded_keys(op)
        return cls(
            op,
            a,
            pairs_of,
            head,
            pair=g.let(tid % T.int32(THREADS // 2)),
            half=g.let(tid // T.int32(THREADS // 2)),
            key=g.local(2 * HALF),
            query=g.local(2 * HALF),
            decay=g.local(2 * HALF),
            factor=g.local(1),
            lane=g.let(tid % T.int32(2 * HALF)),
            mixed=g.shared(4 * (keys // 16) * PITCH, "uint32"),
            late=g.shared(keys * ROWS, "uint32"),
            total=g.shared(keys),
            halves=g.shared(2 * keys),
        )


def padded_keys(op: KdaChunk) -> int:
    """key_dim rounded up to whole fragments."""
    return -(-op.key_dim // 16) * 16


def read(t: Stage, start: Any, count: Any) -> None:
    """This thread's part of a chunk into registers; what does not exist changes nothing."""
    for i in range(2 * HALF):
        for buffer, value in ((t.key, 0.0), (t.query, 0.0), (t.decay, 1.0)):
            g.put(buffer, g.floats(value), i)
    _read_factor(t, start, count)
    with g.when(t.pair * T.int32(2) < T.int32(t.op.key_dim)):
        for i in range(HALF):
            row = g.let(t.half * T.int32(HALF) + T.int32(i))
            with g.when(row < count):
                _read_row(t, i, g.let(start + row))


def _read_row(t: Stage, i: int, row: Any) -> None:
    width = t.op.heads * t.op.key_dim
    _read_pair(t, t.a.qkv, row, 0, t.query, i)
    _read_pair(t, t.a.qkv, row, width, t.key, i)
    _read_pair(t, t.a.decay, row, 0, t.decay, i)


def _read_factor(t: Stage, start: Any, count: Any) -> None:
    """Each lane reads one of the 16 that its warp needs."""
    g.put(t.factor, g.floats(0.0))
    row = g.let(t.half * T.int32(HALF) + t.lane % T.int32(HALF))
    with g.when(row < count):
        at = T.int32(ROW_KEY) + t.lane // T.int32(HALF)
        g.put(t.factor, t.pairs_of[start + row, t.head, at])


def _read_pair(t: Stage, source: Any, row: Any, base: int, target: Any, i: int) -> None:
    """Two channels of a row; one by one where rows are not aligned."""
    keys = t.op.key_dim
    channel = g.let(t.pair * T.int32(2))
    at = t.head * T.int32(keys) + T.int32(base)
    if keys % 2 == 0:
        g.store(target, g.load(source, row, at + channel, lanes=2), 2 * i, lanes=2)
        return
    g.put(target, source[row, at + channel], 2 * i)
    with g.when(channel < T.int32(keys - 1)):
        g.put(target, source[row, at + channel + T.int32(1)], 2 * i + 1)


def share(t: Stage) -> None:
    """What the other half of the rows must know of what `read` has brought; before a barrier."""
    keys = padded_keys(t.op)
    with g.when(t.pair < T.int32(keys // 2)):
        for e in range(2):
            product = g.variable(1.0)
            for i in range(HALF):
                g.put(product, product[0] * t.decay[T.int32(2 * i + e)])
            channel = t.pair * T.int32(2) + T.int32(e)
            g.store(t.halves, product[0], t.half * T.int32(keys) + channel)


def store(t: Stage) -> None:
    """The operands of a chunk from what `read` has brought, after `share` and a barrier."""
    _scale(t)
    with g.when(t.pair < T.int32(padded_keys(t.op) // 2)):
        other = (T.int32(1) - t.half) * T.int32(padded_keys(t.op)) + t.pair * T.int32(2)
        product = [g.let(t.halves[other + T.int32(e)]) for e in range(2)]
        _store_mixed(t, product)
        _store_late(t, product)


def _scale(t: Stage) -> None:
    """Units of keys and queries, times the power of two; all lanes of a warp come along."""
    own = g.let(t.factor[0] * g.floats(SCALE))
    for i in range(HALF):
        for which, rows in enumerate((t.key, t.query)):
            lane = T.int32(which * HALF + i)
            factor = g.let(T.call_extern("float32", "k3_of_lane", own, lane))
            for e in range(2):
                g.put(rows, rows[T.int32(2 * i + e)] * factor, 2 * i + e)


def _store_mixed(t: Stage, product: list[Any]) -> None:
    """A_i k_i and A_i q_i: products of the decays from the first row on."""
    first = t.half == T.int32(0)
    weights = [g.variable(T.Select(first, g.floats(1.0), p)) for p in product]
    steps = padded_keys(t.op) // 16
    within = g.let(
        t.pair // T.int32(8) * T.int32(PITCH)
        + t.half * T.int32(64)
        + t.pair % T.int32(4) * T.int32(4)
        + t.pair % T.int32(8) // T.int32(4)
    )
    for i in range(HALF):
        for e in range(2):
            g.put(weights[e], weights[e][0] * t.decay[T.int32(2 * i + e)])
        column = i // 4 * 2 + i % 2  # of the fragment i // 2 % 2, four columns further by `half`
        for which, rows in enumerate((t.key, t.query)):
            fragment = which * 2 + i // 2 % 2
            at = within + T.int32(fragment * steps * PITCH + column * 16)
            x, y = (g.let(weights[e][0] * rows[T.int32(2 * i + e)]) for e in range(2))
            for part, word in enumerate(split(x, y)):
                g.store(t.mixed, word, at + T.int32(2 * part))


def _store_late(t: Stage, product: list[Any]) -> None:
    """(A_last / A_j) k_j: products of the decays from the last row back; and A_last."""
    first = t.half == T.int32(0)
    weights = [g.variable(T.Select(first, p, g.floats(1.0))) for p in product]
    for i in reversed(range(HALF)):
        for e in range(2):
            at = T.int32(2 * i + e)
            g.put(t.key, t.key[at] * weights[e][0], 2 * i + e)
            g.put(weights[e], weights[e][0] * t.decay[at])
    for e in range(2):
        channel = g.let(t.pair * T.int32(2) + T.int32(e))
        for quad in range(2):
            x = [t.key[T.int32(2 * (4 * quad + i) + e)] for i in range(4)]
            words = g.local(4, "uint32")
            for k, pair in enumerate(((x[0], x[1]), (x[2], x[3]))):
                for part, word in enumerate(split(*pair)):
                    g.put(words, word, 2 * part + k)
            at = late_at(channel, t.half * T.int32(2) + T.int32(quad))
            g.store(t.late, g.load(words, 0, lanes=4), at, lanes=4)
        with g.when(first):
            g.store(t.total, weights[e][0], channel)


def late_at(channel: Any, lane: Any) -> Any:
    """Where the lane of four that has rows 4 lane ... 4 lane + 3 finds a channel's words."""
    fragment, column = channel // T.int32(8), channel % T.int32(8)
    unit = column * T.int32(4) + T.bitwise_xor(lane, column // T.int32(2))
    unit = T.bitwise_xor(unit, fragment % T.int32(2) * T.int32(4))
    return g.let((fragment * T.int32(32) + unit) * T.int32(4))


def split(x: Any, y: Any) -> tuple[Any, Any]:
    """(x, y) as two pairs of float16: the nearest, and what is left."""
    return tuple(
        T.call_pure_extern("uint32", name, x, y) for name in ("k3_pack_f16", "k3_pack_f16_rest")
    )
