"""The KDA state update of many tokens, 16 at a time: matrix products instead of single updates.

With A_i the product of the decays up to row i of a chunk, and S the state before it (spec. 3.5):

    M[i, j] = beta_i (k_i . (A_i / A_j) k_j)   j < i        P[i, j] = q_i . (A_i / A_j) k_j   j <= i
    U_i = beta_i (v_i - (A_i k_i) S) - sum_j M[i, j] U_j     O_i = (A_i q_i) S + sum_j P[i, j] U_j
    S_new = A_last S + sum_j ((A_last / A_j) k_j) U_j

Every A_i / A_j is a running product of decays, which are at most one: nothing can overflow, however
strong the decay, and there is neither a quotient nor an exponential. No sum reads a later row, so
a row's result does not depend, to the last bit, on the rows after it or on their number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules import vector as v
from k3tvm.schedules.kda_chunk_rows import (
    ROWS,
    TILES,
    Head,
    pair_rows,
    read_rows,
    weigh_rows,
)
from k3tvm.schedules.kda_step import kda_step_reference
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule
from k3tvm.schedules.spans import Pieces, sequence, tiles

reference(KdaChunk)(kda_step_reference)


@schedule(KdaChunk, "cpu", "one head of one sequence per task; chunks of 16 rows as small matmuls")
def kda_chunk_cpu(op: KdaChunk, p: CpuProfile, a: SimpleNamespace) -> None:
    """Chunks of a sequence in order; columns of the state are independent inside a chunk."""
    with v.parallel(a.m * v.int64(op.heads)) as task:
        s, head = v.let(task // op.heads), v.let(task % op.heads)
        slot, first, rows = sequence(a.seqs, s)
        head_of = Head.with_buffers(op, p, a, slot, head)
        with v.serial((rows + (ROWS - 1)) // ROWS) as c:
            start = v.let(first + c * ROWS)
            count = v.let(T.min(rows - c * ROWS, v.int64(ROWS)))
            read_rows(head_of, start, count)
            weigh_rows(head_of, count)
            pair_rows(head_of, start, count)
            _write_columns(head_of, start, count)


def _write_columns(h: Head, start: Any, count: Any) -> None:
    """Outputs and the new state, one tile of value columns after the other."""
    rows, vectors = TILES[h.p.isa]
    whole, rest = divmod(h.op.key_dim, rows)

    def tile(column: Any, pieces: Pieces) -> None:
        with v.serial((2 * count + (rows - 1)) // rows) as group:
            _times_state(h, v.let(group * rows), rows, column, pieces)
        with v.serial(count) as i:
            _solve_row(h, start, i, column, pieces)
        if whole:
            with v.serial(whole) as group:
                _update_state(h, v.let(group * rows), rows, count, column, pieces)
        if rest:
            _update_state(h, v.int64(whole * rows), rest, count, column, pieces)

    tiles(h.op.value_dim, vectors, tile)


def _sums(rows: int, pieces: Pieces) -> list[list[Any]]:
    """One accumulator per row and piece, each an array of its own so that it can be a register."""
    return [[v.scratch(lanes) for _, lanes in pieces] for _ in range(rows)]


def _add_outer(
    p: CpuProfile, sums: list[list[Any]], left: list[Any], right: list[Any], pieces: Pieces
) -> None:
    """sums[r][j] += left[r] * right[j]."""
    for row, x in zip(sums, left, strict=True):
        for acc, y, (_, lanes) in zip(row, right, pieces, strict=True):
            old = v.load(acc, 0, lanes=lanes)
            v.store(acc, v.fma(p, v.splat(x, lanes), y, old, lanes), 0, lanes=lanes)


def _times_state(h: Head, first: Any, rows: int, column: Any, pieces: Pieces) -> None:
    """old[first : first + rows] = mixed[...] @ S; what rows past the chunk hold is not used."""
    sums = _sums(rows, pieces)
    for row in sums:
        for acc, (_, lanes) in zip(row, pieces, strict=True):
            v.store(acc, v.splat(0.0, lanes), 0, lanes=lanes)
    with v.serial(h.op.key_dim) as d:
        state = [
            v.let(v.load(h.a.state, h.slot, h.head, d, column + at, lanes=lanes))
            for at, lanes in pieces
        ]
        mixed = [v.let(v.load(h.mixed, first + r, d, lanes=1)) for r in range(rows)]
        _add_outer(h.p, sums, mixed, state, pieces)
    for r, row in enumerate(sums):
        for acc, (at, lanes) in zip(row, pieces, strict=True):
            v.store(h.old, v.load(acc, 0, lanes=lanes), first + r, at, lanes=lanes)


def _solve_row(h: Head, start: Any, i: Any, column: Any, pieces: Pieces) -> None:
    """U_i by forward substitution and O_i along with it; both need the earlier U_j once."""
    op, row = h.op, v.let(start + i)
    beta = v.let(h.a.beta[row, h.head])
    value_at = v.let(2 * op.heads * op.key_dim + h.head * op.value_dim + column)
    sums = write, out = _sums(2, pieces)
    for (at, lanes), u, o in zip(pieces, write, out, strict=True):
        value = v.load(h.a.qkv, row, value_at + at, lanes=lanes)
        surprise = value - v.load(h.old, 2 * i, at, lanes=lanes)
        v.store(u, v.splat(beta, lanes) * surprise, 0, lanes=lanes)
        v.store(o, v.load(h.old, 2 * i + 1, at, lanes=lanes), 0, lanes=lanes)
    with v.serial(i) as j:
        earlier = [v.let(v.load(h.write, j, at, lanes=lanes)) for at, lanes in pieces]
        _add_outer(h.p, sums, [v.let(h.couple[i, j]), v.let(h.attend[i, j])], earlier, pieces)
    own = v.let(h.attend[i, i])
    for (at, lanes), u, o in zip(pieces, write, out, strict=True):
        u_i = v.let(v.load(u, 0, lanes=lanes))
        v.store(h.write, u_i, i, at, lanes=lanes)
        value = v.fma(h.p, v.splat(own, lanes), u_i, v.load(o, 0, lanes=lanes), lanes)
        out_at = h.head * op.value_dim + column + at
        v.store(h.a.out, v.rounded(op.act, value, lanes), row, out_at, lanes=lanes)


def _update_state(h: Head, first: Any, rows: int, count: Any, column: Any, pieces: Pieces) -> None:
    """S[d] = A_last[d] S[d] + sum_j late[j, d] U_j for `rows` key channels from `first` on."""
    sums = _sums(rows, pieces)
    for r, row in enumerate(sums):
        total = v.let(h.total[v.int64(first + r)])
        for acc, (at, lanes) in zip(row, pieces, strict=True):
            s = v.load(h.a.state, h.slot, h.head, first + r, column + at, lanes=lanes)
            v.store(acc, v.splat(total, lanes) * s, 0, lanes=lanes)
    with v.serial(count) as j:
        write = [v.let(v.load(h.write, j, at, lanes=lanes)) for at, lanes in pieces]
        late = [v.let(v.load(h.late, j, first + r, lanes=1)) for r in range(rows)]
        _add_outer(h.p, sums, late, write, pieces)
    for r, row in enumerate(sums):
        for acc, (at, lanes) in zip(row, pieces, strict=True):
            value = v.load(acc, 0, lanes=lanes)
            v.store(h.a.state, value, h.slot, h.head, first + r, column + at, lanes=lanes)
