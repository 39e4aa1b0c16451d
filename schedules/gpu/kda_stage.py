"""Keys, queries and decays of a KDA chunk become tensor-core operands in shared memory.

A thread has two neighbouring channels and eight of the 16 rows. It reads them into registers, which
may happen long before they are needed, and stores them, normalised and times the running products
of the decays, as pairs of float16: a high part and the rest (see `k3tvm.schedules.gpu.kda_mma`).
Everything here is at most one, so one power of two brings all of it into the range of float16.

Where it goes is decided by who reads it: the 16 bytes of a lane lie together, without bank
conflicts. Row 4t + 2h + e of a chunk is column 2t + e of the h-th fragment of eight.
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
    key: Any  # registers [8, 2], like the next two
    query: Any
    own: Any  # decays of these rows
    other: Any  # decays of the other half, from the far end of the chunk or from its first row
    factor: Any  # registers [8, 2]: what makes units of key and query
    mixed: Any  # shared [4 fragments of rows, steps, PITCH]: A_i k_i, A_i q_i
    late: Any  # shared [fragments of channels, 128]: (A_last / A_j) k_j
    total: Any  # shared [keys]: A_last

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
            g.let(tid % T.int32(THREADS // 2)),
            g.let(tid // T.int32(THREADS // 2)),
            *(g.local(2 * HALF) for _ in range(5)),
            mixed=g.shared(4 * (keys // 16) * PITCH, "uint32"),
            late=g.shared(keys * ROWS, "uint32"),
            total=g.shared(keys),
        )


def padded_keys(op: KdaChunk) -> int:
    """key_dim rounded up to whole fragments."""
    return -(-op.key_dim // 16) * 16


def read(t: Stage, start: Any, count: Any) -> None:
    """This thread's part of a chunk into registers; what does not exist changes nothing."""
    for i in range(2 * HALF):
        for buffer, value in ((t.key, 0.0), (t.query, 0.0), (t.own, 1.0), (t.other, 1.0)):
            g.put(buffer, g.floats(value), i)
        g.put(t.factor, g.floats(0.0), i)
    with g.when(t.pair * T.int32(2) < T.int32(t.op.key_dim)):
        for i in range(HALF):
            row = g.let(t.half * T.int32(HALF) + T.int32(i))
            with g.when(row < count):
                _read_row(t, i, g.let(start + row))
            far = g.let(T.Select(t.half == T.int32(0), T.int32(ROWS - 1 - i), T.int32(i)))
            with g.when(far < count):
                _read_pair(t, t.a.decay, g.let(start + far), 0, t.other, i)


def _read_row(t: Stage, i: int, row: Any) -> None:
    width = t.op.heads * t.op.key_dim
    _read_pair(t, t.a.qkv, row, 0, t.query, i)
    _read_pair(t, t.a.qkv, row, width, t.key, i)
    _read_pair(t, t.a.decay, row, 0, t.own, i)
    factors = g.load(t.pairs_of, row, t.head, ROW_KEY, lanes=2)
    g.store(t.factor, factors, 2 * i, lanes=2)


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


def store(t: Stage) -> None:
    """The operands of a chunk from what `read` has brought."""
    with g.when(t.pair < T.int32(padded_keys(t.op) // 2)):
        product = [g.variable(1.0) for _ in range(2)]
        for i in range(HALF):
            for e in range(2):
                g.put(product[e], product[e][0] * t.other[T.int32(2 * i + e)])
        _scale(t)
        _store_mixed(t, product)
        _store_late(t, product)


def _scale(t: Stage) -> None:
    """Units of keys and queries, times the power of two."""
    for i in range(HALF):
        for which, rows in enumerate((t.key, t.query)):
            factor = g.let(t.factor[T.int32(2 * i + which)] * g.floats(SCALE))
            for e in range(2):
                g.put(rows, rows[T.int32(2 * i + e)] * factor, 2 * i + e)


def _store_mixed(t: Stage, product: list[Any]) -> None:
    """A_i k_i and A_i q_i: products of the decays from the first row on."""
    first = t.half == T.int32(0)
    weights = [g.variable(T.Select(first, g.floats(1.0), p[0])) for p in product]
    steps = padded_keys(t.op) // 16
    within = g.let(
        t.pair // T.int32(8) * T.int32(PITCH)
        + t.half * T.int32(64)
        + t.pair % T.int32(4) * T.int32(4)
        + t.pair % T.int32(8) // T.int32(4) * T.int32(2)
    )
    for i in range(HALF):
        for e in range(2):
            g.put(weights[e], weights[e][0] * t.own[T.int32(2 * i + e)])
        column = i // 4 * 2 + i % 2  # of the fragment i // 2 % 2, four columns further by `half`
        for which, rows in enumerate((t.key, t.query)):
            fragment = which * 2 + i // 2 % 2
            at = within + T.int32(fragment * steps * PITCH + column * 16)
            x, y = (g.let(weights[e][0] * rows[T.int32(2 * i + e)]) for e in range(2))
            _store_parts(t.mixed, at, [(x, y)])


def _store_late(t: Stage, product: list[Any]) -> None:
    """(A_last / A_j) k_j: products of the decays from the last row back; and A_last."""
    first = t.half == T.int32(0)
    weights = [g.variable(T.Select(first, p[0], g.floats(1.0))) for p in product]
    for i in reversed(range(HALF)):
        for e in range(2):
            at = T.int32(2 * i + e)
            g.put(t.key, t.key[at] * weights[e][0], 2 * i + e)
            g.put(weights[e], weights[e][0] * t.own[at])
    for e in range(2):
        channel = g.let(t.pair * T.int32(2) + T.int32(e))
        for quad in range(2):
            x = [t.key[T.int32(2 * (4 * quad + i) + e)] for i in range(4)]
            at = late_at(channel, t.half * T.int32(2) + T.int32(quad))
            _store_parts(t.late, at, [(x[0], x[1]), (x[2], x[3])])
        with g.when(first):
            g.store(t.total, weights[e][0], channel)


def late_at(channel: Any, lane: Any) -> Any:
    """Where the lane of four that has rows 4 lane ... 4 lane + 3 finds a channel's words."""
    fragment, column = channel // T.int32(8), channel % T.int32(8)
    unit = column * T.int32(4) + T.bitwise_xor(lane, column // T.int32(2))
    unit = T.bitwise_xor(unit, fragment % T.int32(2) * T.int32(4))
    return g.let((fragment * T.int32(32) + unit) * T.int32(4))


def _store_parts(target: Any, at: Any, pairs: list[tuple[Any, Any]]) -> None:
    """High part and rest of each pair, one after the other, at once."""
    words = g.local(2 * len(pairs), "uint32")
    for i, pair in enumerate(pairs):
        high, rest = split(*pair)
        g.put(words, high, 2 * i)
        g.put(words, rest, 2 * i + 1)
    lanes = 2 * len(pairs)
    g.store(target, g.load(words, 0, lanes=lanes), at, lanes=lanes)


def split(x: Any, y: Any) -> tuple[Any, Any]:
    """(x, y) as two pairs of float16: the nearest, and what is left."""
    return tuple(
        T.call_pure_extern("uint32", name, x, y) for name in ("k3_pack_f16", "k3_pack_f16_rest")
    )
