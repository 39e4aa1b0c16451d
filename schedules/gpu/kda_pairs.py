"""The part of a KDA chunk that does not see the state, on a GPU: all chunks of a call at once.

For the rows i, j of a chunk, with running products of the decays (names as in
`k3tvm.schedules.kda_chunk`),

    M[i, j] = beta_i (k_i . (A_i / A_j) k_j)   j < i       P[i, j] = q_i . (A_i / A_j) k_j   j <= i
    T = (I + M)^-1 diag(beta)                              W = P T

A team of threads takes two neighbouring columns, from the row of the first down: what it reads of a
row serves four sums, and one product with the decays of a row leads from each pair to the next. No
pair reads a later row.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.chunks import find_chunk, most_chunks
from k3tvm.schedules.kda_step import L2_EPS

ROWS = 16  # of a chunk, whatever the length of the sequence: results must not depend on it
TEAM = 8  # threads that share the key channels of two columns
TEAMS = ROWS // 2
THREADS = TEAM * TEAMS
STEPS = TEAMS * (TEAMS + 1)  # rows of all teams
SUMS = STEPS * 4  # of the two columns of a team, with the key and with the query
SQUARES = THREADS // (2 * ROWS)  # threads that share the square of a key or query
KEY, QUERY, DECAY = range(3)
# A row of the result: T[i, :], W[i, :], the factors that make units of key and query
ROW_T, ROW_W, ROW_KEY, ROW_QUERY, ROW_WIDTH = 0, ROWS, 2 * ROWS, 2 * ROWS + 1, 2 * ROWS + 4


@dataclass(frozen=True)
class _Pairs:
    """One chunk of one head, as one thread of the workgroup sees it."""

    op: KdaChunk
    a: SimpleNamespace
    start: Any  # first row of the chunk
    count: Any  # its rows
    head: Any
    tid: Any
    inputs: Any  # shared [3, 16, stride]: some channels of keys, queries, decays
    shares: Any  # shared [SUMS, TEAM + 1]: each thread's part of each sum
    norms: Any  # shared [32, SQUARES]: shares of the squares of 16 keys and 16 queries
    scales: Any  # shared [3, 16]: factors of keys and queries, beta
    pairs: Any  # shared [2, 16, 16]: M and P
    solved: Any  # shared [16, 16]: (I + M)^-1

    @property
    def groups(self) -> int:
        """Groups of four channels of a thread in one pass."""
        return 2 if self.op.key_dim > 4 * TEAM else 1

    @property
    def channels(self) -> int:
        """Channels of one pass."""
        return 4 * TEAM * self.groups

    @property
    def stride(self) -> int:
        """Elements from one row of the inputs to the next; rows begin in different banks."""
        return self.channels + 4

    @property
    def team(self) -> Any:
        """Which two columns this thread has."""
        return self.tid // T.int32(TEAM)

    def at(self, which: int, row: Any, channel: Any) -> Any:
        """Index into the inputs."""
        return T.int32(which * ROWS * self.stride) + row * T.int32(self.stride) + channel


def pair_launch(op: KdaChunk, a: SimpleNamespace) -> Any:
    """Launch the kernel; returns the device memory [n, heads, ROW_WIDTH] that it fills."""
    result = g.workspace((a.n, op.heads, ROW_WIDTH))
    with g.groups(most_chunks(a, ROWS) * T.int32(op.heads), THREADS) as (group, tid):
        head, chunk = g.let(group % T.int32(op.heads)), g.let(group // T.int32(op.heads))
        inputs, shares = g.shared(3 * ROWS * (8 * TEAM + 4)), g.shared(SUMS * (TEAM + 1))
        norms, scales = g.shared(THREADS), g.shared(3 * ROWS)
        pairs, solved = g.shared(2 * ROWS * ROWS), g.shared(ROWS * ROWS)
        s, local = find_chunk(a, chunk, ROWS)
        with g.when(s[0] >= T.int32(0)):
            offset = g.let(local[0] * T.int32(ROWS))
            start = g.let(a.seqs[s[0], T.int32(1)] + offset)
            count = g.let(T.min(a.seqs[s[0], T.int32(2)] - offset, T.int32(ROWS)))
            t = _Pairs(op, a, start, count, head, tid, inputs, shares, norms, scales, pairs, solved)
            _add_pairs(t)
            _read_scales(t)
            with g.strided(tid, SUMS, THREADS) as entry:
                _place(t, entry)
            g.barrier()
            _solve(t)
            _store(t, result)
    return result


def _add_pairs(t: _Pairs) -> None:
    """This thread's share of its pairs and of the square of a row, some channels at a time."""
    square = g.variable(0.0)
    with g.serial((T.int32(ROWS) - t.team * T.int32(2)) * T.int32(4)) as entry:
        g.store(t.shares, g.floats(0.0), _share(t, entry))
    with g.serial(-(-t.op.key_dim // t.channels)) as turn:
        _read(t, g.let(turn * T.int32(t.channels)))
        g.barrier()
        row = g.let(t.tid // T.int32(SQUARES))  # keys and queries lie one after the other
        with g.strided(t.tid % T.int32(SQUARES), t.channels, SQUARES) as d:
            x = g.let(t.inputs[row * T.int32(t.stride) + d])
            g.put(square, square[0] + x * x)
        _walk(t)
        g.barrier()
    g.store(t.norms, square[0], t.tid)


def _first_step(team: Any) -> Any:
    """The number of the first row of a team, when the rows of all teams are counted."""
    return team * (T.int32(ROWS + 1) - team)


def _share(t: _Pairs, entry: Any) -> Any:
    """Where this thread keeps its part of a sum: entry = 4 * step, + 2 column, + 1 with query."""
    row = g.let(_first_step(t.team) * T.int32(4) + entry)
    return row * T.int32(TEAM + 1) + t.tid % T.int32(TEAM)


def _read(t: _Pairs, base: Any) -> None:
    """Keys, queries and decays; rows and channels that do not exist change nothing."""
    op, a = t.op, t.a
    key_at = op.heads * op.key_dim
    with g.strided(t.tid, ROWS * t.channels, THREADS) as item:
        i, d = g.let(item // T.int32(t.channels)), g.let(item % T.int32(t.channels))
        values = [g.variable(v) for v in (0.0, 0.0, 1.0)]
        with g.when(T.And(i < t.count, base + d < T.int32(op.key_dim))):
            row, column = g.let(t.start + i), g.let(t.head * T.int32(op.key_dim) + base + d)
            g.put(values[KEY], a.qkv[row, column + T.int32(key_at)])
            g.put(values[QUERY], a.qkv[row, column])
            g.put(values[DECAY], a.decay[row, column])
        for which, value in enumerate(values):
            g.store(t.inputs, value[0], t.at(which, i, d))


def _walk(t: _Pairs) -> None:
    """The rows of this thread's two columns in order: the decayed keys go along in registers."""
    member = t.tid % T.int32(TEAM)
    at = [g.let((member + T.int32(k * TEAM)) * T.int32(4)) for k in range(t.groups)]
    decayed = [[g.variable(g.splat(0.0, 4)) for _ in at] for _ in range(2)]
    first = g.let(t.team * T.int32(2))
    with g.serial(T.int32(ROWS) - first) as step:
        row = g.let(first + step)
        sums = [g.variable(g.splat(0.0, 4)) for _ in range(4)]
        for k, d in enumerate(at):
            key, query, decay = (
                g.let(g.load(t.inputs, t.at(which, row, d), lanes=4))
                for which in (KEY, QUERY, DECAY)
            )
            for column in range(2):
                other = decayed[column][k]
                g.store(other, g.load(other, 0, lanes=4) * decay, 0, lanes=4)
                with g.when(step == T.int32(column)):
                    g.store(other, key, 0, lanes=4)
                for which, own in enumerate((key, query)):
                    total = sums[2 * column + which]
                    value = g.load(total, 0, lanes=4) + own * g.load(other, 0, lanes=4)
                    g.store(total, value, 0, lanes=4)
        for which, total in enumerate(sums):
            cell = g.let(_share(t, step * T.int32(4) + T.int32(which)))
            low, high = (total[T.int32(k)] + total[T.int32(k + 1)] for k in (0, 2))
            g.store(t.shares, t.shares[cell] + (low + high), cell)


def _read_scales(t: _Pairs) -> None:
    """Factors of keys and queries, and beta; rows that do not exist have beta 0."""
    g.barrier()
    with g.when(t.tid < T.int32(2 * ROWS)):
        square = g.variable(0.0)
        with g.serial(SQUARES) as k:
            g.put(square, square[0] + t.norms[t.tid * T.int32(SQUARES) + k])
        query = g.floats(t.op.key_dim**-0.5)
        size = T.Select(t.tid < T.int32(ROWS), g.floats(1.0), query)
        g.store(t.scales, g.let(size / T.sqrt(square[0] + g.floats(L2_EPS))), t.tid)
    with g.when(t.tid < T.int32(ROWS)):
        beta = g.variable(0.0)
        with g.when(t.tid < t.count):
            g.put(beta, t.a.beta[t.start + t.tid, t.head])
        g.store(t.scales, beta[0], t.tid + T.int32(2 * ROWS))
    g.barrier()


def _place(t: _Pairs, entry: Any) -> None:
    """Add up one pair and store it as M[i, j] or P[i, j] of unit keys and queries."""
    total = g.variable(0.0)
    with g.serial(TEAM) as k:
        g.put(total, total[0] + t.shares[entry * T.int32(TEAM + 1) + k])
    step = g.let(entry // T.int32(4))
    team = g.variable(T.int32(0), "int32")
    for other in range(1, TEAMS):
        with g.when(step >= T.int32(other * (ROWS + 1 - other))):
            g.put(team, T.int32(other))
    row = g.let(team[0] * T.int32(2) + step - _first_step(team[0]))
    column = g.let(team[0] * T.int32(2) + entry // T.int32(2) % T.int32(2))
    which = g.let(entry % T.int32(2))
    with g.when(column <= row):
        by_key = g.let(t.scales[row] * t.scales[row + T.int32(2 * ROWS)])
        by_query = g.let(t.scales[row + T.int32(ROWS)])
        scale = g.let(T.Select(which == T.int32(0), by_key, by_query) * t.scales[column])
        at = which * T.int32(ROWS * ROWS) + row * T.int32(ROWS) + column
        g.store(t.pairs, total[0] * scale, at)


def _solve(t: _Pairs) -> None:
    """(I + M)^-1 by forward substitution, one column per thread; rows above the diagonal are 0."""
    with g.when(t.tid < T.int32(ROWS)), g.serial(ROWS) as i:
        value = g.variable(T.Select(t.tid == i, g.floats(1.0), g.floats(0.0)))
        with g.serial(i) as j:
            x = t.solved[j * T.int32(ROWS) + t.tid]
            g.put(value, value[0] - t.pairs[i * T.int32(ROWS) + j] * x)
        g.store(t.solved, value[0], i * T.int32(ROWS) + t.tid)
    g.barrier()


def _store(t: _Pairs, result: Any) -> None:
    """T, W = P T and the factors, row by row; what is right of the diagonal is never read."""
    with g.strided(t.tid, ROWS * ROWS, THREADS) as entry:
        i, c = g.let(entry // T.int32(ROWS)), g.let(entry % T.int32(ROWS))
        with g.when(T.And(i < t.count, c <= i)):
            total = g.variable(0.0)
            with g.serial_range(c, i + T.int32(1)) as j:
                p = t.pairs[T.int32(ROWS * ROWS) + i * T.int32(ROWS) + j]
                g.put(total, total[0] + p * t.solved[j * T.int32(ROWS) + c])
            beta = g.let(t.scales[c + T.int32(2 * ROWS)])
            g.store(result, t.solved[entry] * beta, t.start + i, t.head, c + T.int32(ROW_T))
            g.store(result, total[0] * beta, t.start + i, t.head, c + T.int32(ROW_W))
    with g.when(t.tid < t.count):
        for at, scale in ((ROW_KEY, t.tid), (ROW_QUERY, t.tid + T.int32(ROWS))):
            g.store(result, t.scales[scale], t.start + t.tid, t.head, at)
