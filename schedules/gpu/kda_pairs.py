"""The part of a KDA chunk that does not see the state, on a GPU: all chunks of a call at once.

For the rows i, j of a chunk, with running products of the decays (names as in
`k3tvm.schedules.kda_chunk`),

    M[i, j] = beta_i (k_i . (A_i / A_j) k_j)   j < i       P[i, j] = q_i . (A_i / A_j) k_j   j <= i
    T = (I + M)^-1 diag(beta)                              W = P T

A thread takes column j from row j down and then column 15 - j: 17 pairs for every thread, and one
product with the decays of a row leads from each pair to the next. No pair reads a later row.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.kda_step import L2_EPS

ROWS = 16  # of a chunk, whatever the length of the sequence: results must not depend on it
THREADS = 128
TEAM = 16  # threads that share the key channels of a column; THREADS / TEAM columns at a time
STEPS = ROWS + 1
SUMS = STEPS * 2 * (THREADS // TEAM)  # pairs of all threads, with the key and with the query
KEY, QUERY, DECAY = range(3)
# A row of the result: T[i, :], W[i, :], the factors that make units of key and query
ROW_T, ROW_W, ROW_KEY, ROW_QUERY, ROW_WIDTH = 0, ROWS, 2 * ROWS, 2 * ROWS + 1, 2 * ROWS + 4


def padded_keys(op: KdaChunk) -> int:
    """key_dim rounded up to what the kernels divide it by."""
    return -(-op.key_dim // 16) * 16


def bytes_of(op: KdaChunk) -> int:
    """Shared memory of the kernel."""
    return 4 * (_input_size(op) + THREADS + 3 * ROWS + 3 * ROWS * ROWS)


def _stride(op: KdaChunk) -> int:
    return padded_keys(op) + 4  # rows begin in different banks


def _input_size(op: KdaChunk) -> int:
    return max(3 * ROWS * _stride(op), SUMS * (TEAM + 1))


@dataclass(frozen=True)
class _Pairs:
    op: KdaChunk
    a: SimpleNamespace
    start: Any  # first row of the chunk
    count: Any  # its rows
    head: Any
    tid: Any
    inputs: Any  # shared: keys, queries, decays [3, 16, stride]; then shares of the sums
    norms: Any  # shared [32, 4]: shares of the squares of 16 keys and 16 queries
    scales: Any  # shared [3, 16]: factors of keys and queries, beta
    pairs: Any  # shared [2, 16, 16]: M and P
    solved: Any  # shared [16, 16]: T


def pair_launch(op: KdaChunk, a: SimpleNamespace) -> Any:
    """Launch the kernel; returns the device memory [n, heads, ROW_WIDTH] that it fills."""
    result = g.workspace((a.n, op.heads, ROW_WIDTH))
    # a sequence has at most one chunk that is not full
    chunks = g.let(a.n // T.int32(ROWS) + a.m)
    with g.groups(chunks * T.int32(op.heads), THREADS) as (group, tid):
        head, chunk = g.let(group % T.int32(op.heads)), g.let(group // T.int32(op.heads))
        inputs, norms = g.shared(_input_size(op)), g.shared(THREADS)
        scales, pairs, solved = g.shared(3 * ROWS), g.shared(2 * ROWS * ROWS), g.shared(ROWS * ROWS)
        s, local = find_chunk(a, chunk)
        with g.when(s[0] >= T.int32(0)):
            offset = g.let(local[0] * T.int32(ROWS))
            start = g.let(a.seqs[s[0], T.int32(1)] + offset)
            count = g.let(T.min(a.seqs[s[0], T.int32(2)] - offset, T.int32(ROWS)))
            t = _Pairs(op, a, start, count, head, tid, inputs, norms, scales, pairs, solved)
            _read(t)
            shares = _pair_shares(t)
            _add_up(t, shares)
            _solve(t)
            _store(t, result)
    return result


def find_chunk(a: SimpleNamespace, chunk: Any) -> tuple[Any, Any]:
    """Variables: the sequence that has the chunk of this number, or -1; the number within it."""
    sequence, rest = g.variable(-1, "int32"), g.variable(chunk)
    with g.serial(a.m) as s:
        chunks = g.let((a.seqs[s, T.int32(2)] + T.int32(ROWS - 1)) // T.int32(ROWS))
        with g.when(sequence[0] < T.int32(0)), T.If(rest[0] < chunks):
            with T.Then():
                g.put(sequence, s)
            with T.Else():
                g.put(rest, rest[0] - chunks)
    return sequence, rest


def _at(t: _Pairs, which: int, row: Any, column: Any) -> Any:
    return T.int32(which * ROWS * _stride(t.op)) + row * T.int32(_stride(t.op)) + column


def _read(t: _Pairs) -> None:
    """Keys, queries and decays; rows and channels that do not exist change nothing."""
    op, a = t.op, t.a
    key_at = op.heads * op.key_dim
    with g.serial(ROWS) as i, g.strided(t.tid, padded_keys(op), THREADS) as d:
        values = [g.variable(v) for v in (0.0, 0.0, 1.0)]
        with g.when(T.And(i < t.count, d < T.int32(op.key_dim))):
            row, column = g.let(t.start + i), g.let(t.head * T.int32(op.key_dim) + d)
            g.put(values[KEY], a.qkv[row, column + T.int32(key_at)])
            g.put(values[QUERY], a.qkv[row, column])
            g.put(values[DECAY], a.decay[row, column])
        for which, value in enumerate(values):
            g.store(t.inputs, value[0], _at(t, which, i, d))
    with g.when(t.tid < T.int32(ROWS)):
        beta = g.variable(0.0)
        with g.when(t.tid < t.count):
            g.put(beta, a.beta[t.start + t.tid, t.head])
        g.store(t.scales, beta[0], t.tid + T.int32(2 * ROWS))
    g.barrier()


def _pair_shares(t: _Pairs) -> list[tuple[Any, Any]]:
    """This thread's share of the squares of a row, and of its 17 pairs."""
    square = g.variable(0.0)
    row = g.let(t.tid // T.int32(4))  # keys and queries lie one after the other: 32 rows
    with g.strided(t.tid % T.int32(4), padded_keys(t.op), 4) as d:
        x = g.let(t.inputs[row * T.int32(_stride(t.op)) + d])
        g.put(square, square[0] + x * x)
    g.store(t.norms, square[0], t.tid)
    shares = [(g.variable(0.0), g.variable(0.0)) for _ in range(STEPS)]
    decayed = g.variable(g.splat(0.0, 4))
    first = g.let(t.tid // T.int32(TEAM))
    with g.strided(t.tid % T.int32(TEAM), padded_keys(t.op) // 4, TEAM) as group:
        for step, totals in enumerate(shares):
            _pair(t, first, step, g.let(group * T.int32(4)), decayed, totals)
    return shares


def _row_of(first: Any, step: int) -> Any:
    """The row of a step: first, ..., 15 in column `first`, then 15 - first, ..., 15."""
    return T.Select(first + T.int32(step) < T.int32(ROWS), first + T.int32(step), T.int32(step - 1))


def _pair(
    t: _Pairs, first: Any, step: int, column: Any, decayed: Any, totals: tuple[Any, Any]
) -> None:
    """Four channels of one pair."""
    row = g.let(_row_of(first, step))
    key = g.let(g.load(t.inputs, _at(t, KEY, row, column), lanes=4))
    query = g.let(g.load(t.inputs, _at(t, QUERY, row, column), lanes=4))
    if step == 0:
        g.store(decayed, key, 0, lanes=4)
    else:
        with T.If(first + T.int32(step) == T.int32(ROWS)):
            with T.Then():
                g.store(decayed, key, 0, lanes=4)
            with T.Else():
                decay = g.load(t.inputs, _at(t, DECAY, row, column), lanes=4)
                g.store(decayed, g.load(decayed, 0, lanes=4) * decay, 0, lanes=4)
    other = g.let(g.load(decayed, 0, lanes=4))
    for total, own in zip(totals, (key, query), strict=True):
        products = g.let(own * other)
        low = g.lane(products, 0) + g.lane(products, 1)
        g.put(total, total[0] + (low + (g.lane(products, 2) + g.lane(products, 3))))


def _add_up(t: _Pairs, shares: list[tuple[Any, Any]]) -> None:
    """M and P of unit keys and queries; the inputs are not needed any more."""
    op = t.op
    first, member = t.tid // T.int32(TEAM), t.tid % T.int32(TEAM)
    g.barrier()
    for step, totals in enumerate(shares):
        for which, total in enumerate(totals):
            entry = first + T.int32((step * 2 + which) * (THREADS // TEAM))
            g.store(t.inputs, total[0], entry * T.int32(TEAM + 1) + member)
    with g.when(t.tid < T.int32(2 * ROWS)):
        square = g.variable(0.0)
        with g.serial(4) as k:
            g.put(square, square[0] + t.norms[t.tid * T.int32(4) + k])
        size = T.Select(t.tid < T.int32(ROWS), g.floats(1.0), g.floats(op.key_dim**-0.5))
        g.store(t.scales, g.let(size / T.sqrt(square[0] + g.floats(L2_EPS))), t.tid)
    g.barrier()
    with g.strided(t.tid, SUMS, THREADS) as entry:
        total = g.variable(0.0)
        with g.serial(TEAM) as k:
            g.put(total, total[0] + t.inputs[entry * T.int32(TEAM + 1) + k])
        _place(t, entry, total[0])
    g.barrier()


def _place(t: _Pairs, entry: Any, total: Any) -> None:
    """Store one sum as M[i, j] or P[i, j]."""
    columns = THREADS // TEAM
    first, which = entry % T.int32(columns), g.let(entry // T.int32(columns) % T.int32(2))
    step = g.let(entry // T.int32(2 * columns))
    before = g.let(first + step < T.int32(ROWS))
    row = g.let(T.Select(before, first + step, step - T.int32(1)))
    column = g.let(T.Select(before, first, T.int32(ROWS - 1) - first))
    by_key = g.let(t.scales[row] * t.scales[row + T.int32(2 * ROWS)])
    scale = g.let(T.Select(which == T.int32(0), by_key, t.scales[row + T.int32(ROWS)]))
    at = which * T.int32(ROWS * ROWS) + row * T.int32(ROWS) + column
    g.store(t.pairs, total * (scale * t.scales[column]), at)


def _solve(t: _Pairs) -> None:
    """T by forward substitution: one column per thread, in registers."""
    with g.when(t.tid < T.int32(ROWS)):
        column: list[Any] = []
        beta = g.let(t.scales[t.tid + T.int32(2 * ROWS)])
        for i in range(ROWS):
            value = g.variable(T.Select(t.tid == T.int32(i), g.floats(1.0), g.floats(0.0)))
            for j, x in enumerate(column):
                g.put(value, value[0] - t.pairs[T.int32(i * ROWS + j)] * x)
            column.append(g.let(value[0]))
            g.store(t.solved, column[i] * beta, t.tid + T.int32(i * ROWS))
    g.barrier()


def _store(t: _Pairs, result: Any) -> None:
    """T, W = P T and the factors, row by row."""
    with g.strided(t.tid, ROWS * ROWS, THREADS) as entry:
        i, c = g.let(entry // T.int32(ROWS)), g.let(entry % T.int32(ROWS))
        total = g.variable(0.0)
        with g.serial_range(c, T.max(i + T.int32(1), c)) as j:
            p = t.pairs[T.int32(ROWS * ROWS) + i * T.int32(ROWS) + j]
            g.put(total, total[0] + p * t.solved[j * T.int32(ROWS) + c])
        with g.when(i < t.count):
            g.store(result, t.solved[entry], t.start + i, t.head, c + T.int32(ROW_T))
            g.store(result, total[0], t.start + i, t.head, c + T.int32(ROW_W))
    with g.when(t.tid < t.count):
        for at, scale in ((ROW_KEY, t.tid), (ROW_QUERY, t.tid + T.int32(ROWS))):
            g.store(result, t.scales[scale], t.start + t.tid, t.head, at)
