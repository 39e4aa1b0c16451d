"""The part of a KDA chunk that does not see the state: products of keys, queries and decays.

Formulas and names as in `k3tvm.schedules.kda_chunk`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules import vector as v
from k3tvm.schedules.kda_step import inverse_norm
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.spans import along

ROWS = 16  # of a chunk, whatever the length of the sequence: results must not depend on it

# (rows, vectors of 16) of a register tile of a matrix product; rows divide the 32 of `mixed`
TILES = {"avx512": (8, 2), "avx2": (4, 1), "portable": (2, 1)}


@dataclass(frozen=True)
class Head:
    """What the stages of a chunk share: the operator, its arguments, and buffers of one head.

    Rows are [padded] wide: key_dim rounded up to whole vectors, the rest zero.
    """

    op: KdaChunk
    p: CpuProfile
    a: SimpleNamespace
    slot: Any
    head: Any
    padded: int
    query: Any  # [16, padded] unit queries, scaled
    key: Any  # [16, padded] unit keys
    decay: Any  # [16, padded]
    mixed: Any  # [32, padded] A_i k_i in row 2i, A_i q_i in row 2i + 1
    late: Any  # [16, padded] (A_last / A_j) k_j
    total: Any  # [padded] A_last
    couple: Any  # [16, 16] -M
    attend: Any  # [16, 16] P
    old: Any  # [32, columns] `mixed` times the state
    write: Any  # [16, columns] U

    @classmethod
    def with_buffers(
        cls, op: KdaChunk, p: CpuProfile, a: SimpleNamespace, slot: Any, head: Any
    ) -> Head:
        """Allocate the buffers once per task."""
        padded = -(-op.key_dim // v.LANES) * v.LANES
        columns = TILES[p.isa][1] * v.LANES
        return cls(
            op,
            p,
            a,
            slot,
            head,
            padded,
            query=v.workspace((ROWS, padded)),
            key=v.workspace((ROWS, padded)),
            decay=v.workspace((ROWS, padded)),
            mixed=v.workspace((2 * ROWS, padded)),
            late=v.workspace((ROWS, padded)),
            total=v.workspace((padded,)),
            couple=v.workspace((ROWS, ROWS)),
            attend=v.workspace((ROWS, ROWS)),
            old=v.workspace((2 * ROWS, columns)),
            write=v.workspace((ROWS, columns)),
        )


def read_rows(h: Head, start: Any, count: Any) -> None:
    """Copy decays and normalised queries and keys: rows far apart would share cache sets."""
    op, a = h.op, h.a
    query_at = v.let(h.head * op.key_dim)
    key_at = v.let((h.head + op.heads) * op.key_dim)
    with v.serial(count) as i:
        row = v.let(start + i)
        query_scale = inverse_norm(h.p, a.qkv, row, query_at, op.key_dim)
        query_scale = v.let(query_scale * T.float32(op.key_dim**-0.5))
        key_scale = inverse_norm(h.p, a.qkv, row, key_at, op.key_dim)

        def piece(at: Any, lanes: int) -> None:
            query = v.load(a.qkv, row, query_at + at, lanes=lanes) * v.splat(query_scale, lanes)
            key = v.load(a.qkv, row, key_at + at, lanes=lanes) * v.splat(key_scale, lanes)
            v.store(h.query, query, i, at, lanes=lanes)
            v.store(h.key, key, i, at, lanes=lanes)
            decay = v.load(a.decay, row, query_at + at, lanes=lanes)
            v.store(h.decay, decay, i, at, lanes=lanes)

        along(op.key_dim, piece)
        for at, lanes in v.chunks(h.padded - op.key_dim):
            for buffer in (h.query, h.key, h.decay):
                v.store(buffer, v.splat(0.0, lanes), i, op.key_dim + at, lanes=lanes)


def weigh_rows(h: Head, count: Any) -> None:
    """`mixed`, `late` and `total`: running products of the decays from both ends."""
    running = v.scratch(v.LANES)
    with v.serial(h.padded // v.LANES) as c:
        at = v.let(c * v.LANES)
        v.store(running, v.splat(1.0), 0)
        with v.serial(count) as i:
            weight = v.let(v.load(running, 0) * v.load(h.decay, i, at))
            v.store(running, weight, 0)
            v.store(h.mixed, weight * v.load(h.key, i, at), 2 * i, at)
            v.store(h.mixed, weight * v.load(h.query, i, at), 2 * i + 1, at)
        v.store(h.total, v.load(running, 0), at)
        v.store(running, v.splat(1.0), 0)
        with v.serial(count) as i:
            j = v.let(count - 1 - i)
            weight = v.let(v.load(running, 0))
            v.store(h.late, weight * v.load(h.key, j, at), j, at)
            v.store(running, weight * v.load(h.decay, j, at), 0)


def pair_rows(h: Head, start: Any, count: Any) -> None:
    """`couple` and `attend`: key j, decayed row by row, times the keys and queries of rows i."""
    offsets = [c * v.LANES for c in range(h.padded // v.LANES)]
    running = [v.scratch(v.LANES) for _ in offsets]
    with v.serial(count) as j:
        own = v.splat(0.0)
        for at, key in zip(offsets, running, strict=True):
            key_j = v.let(v.load(h.key, j, at))
            v.store(key, key_j, 0)
            own = v.let(v.fma(h.p, key_j, v.load(h.query, j, at), own))
        v.store(h.attend, v.reduce_add(own), j, j, lanes=1)
        with v.serial_range(j + 1, count) as i:
            by_key, by_query = v.splat(0.0), v.splat(0.0)
            for at, key in zip(offsets, running, strict=True):
                decayed = v.let(v.load(key, 0) * v.load(h.decay, i, at))
                v.store(key, decayed, 0)
                by_key = v.let(v.fma(h.p, decayed, v.load(h.key, i, at), by_key))
                by_query = v.let(v.fma(h.p, decayed, v.load(h.query, i, at), by_query))
            beta = h.a.beta[start + i, h.head]
            v.store(h.couple, -beta * v.reduce_add(by_key), i, j, lanes=1)
            v.store(h.attend, v.reduce_add(by_query), i, j, lanes=1)
