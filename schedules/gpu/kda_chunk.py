"""The KDA state update of many tokens on a GPU, 16 at a time: matrix products, not single updates.

With A_i the product of the decays up to row i of a chunk, S the state before it, and T and W from
`k3tvm.schedules.gpu.kda_pairs` (specification 3.5):

    Y_i = v_i - (A_i k_i) S       U_i = sum_j T[i, j] Y_j      O_i = (A_i q_i) S + sum_j W[i, j] Y_j
    S_new = A_last S + sum_j ((A_last / A_j) k_j) U_j

Every A_i / A_j is a running product of decays, which are at most one: nothing can overflow, however
strong the decay, and there is neither a quotient nor an exponential. No sum reads a later row, so
a row's result does not depend, to the last bit, on the rows after it or on their number.

A workgroup has some value columns of one head of one sequence. Their state stays in shared memory
from the first chunk to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.kda_pairs import (
    ROW_KEY,
    ROW_QUERY,
    ROW_T,
    ROW_W,
    ROW_WIDTH,
    ROWS,
    pair_launch,
)
from k3tvm.schedules.gpu.kda_step import power_above, run_steps
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule

MIXED = 2 * ROWS + 4  # a key channel in `operand`: 16 keys, 16 queries; neighbours in other banks
TILE = 4  # rows and columns of the products in registers
THREADS = 128


def padded_keys(op: KdaChunk) -> int:
    """key_dim rounded up to what the stages divide it by."""
    return -(-op.key_dim // 16) * 16


@dataclass(frozen=True)
class _Tile:
    """One workgroup's columns, as one of its threads sees them."""

    op: KdaChunk
    a: SimpleNamespace
    pairs_of: Any  # device memory from `pair_launch`
    width: int  # columns of the workgroup
    slot: Any
    head: Any
    base: Any  # first column
    tid: Any
    state: Any  # shared [padded keys, width]
    operand: Any  # shared: A k and A q by channel, then shares of sums, then (A_last / A_j) k_j
    pairs: Any  # shared [16, ROW_WIDTH]: T, W, factors of keys and queries
    surprise: Any  # shared [16, width]: Y
    write: Any  # shared [16, width]: U, with the factor of its key
    total: Any  # shared [padded keys]: A_last

    @property
    def keys(self) -> int:
        """Key channels with padding."""
        return padded_keys(self.op)

    @property
    def groups(self) -> int:
        """Groups of four columns."""
        return self.width // TILE

    @property
    def turns(self) -> int:
        """How many of the 32 x groups results of four columns a thread has."""
        return -(-2 * ROWS * self.groups // THREADS)

    @property
    def splits(self) -> int:
        """Threads that share the key channels of one product."""
        return THREADS // (2 * ROWS // TILE * self.groups)


def operand_size(op: KdaChunk) -> int:
    """Elements of `operand`: the largest of its three contents."""
    shares = THREADS * TILE * TILE
    return max(padded_keys(op) * MIXED, shares, ROWS * (padded_keys(op) + TILE))


def scan_bytes(op: KdaChunk, width: int) -> int:
    """Shared memory of the second kernel."""
    keys = padded_keys(op)
    return 4 * (keys * (width + 1) + operand_size(op) + ROWS * (ROW_WIDTH + 2 * width))


def tile_width(op: KdaChunk, p: GpuProfile) -> int:
    """Columns of a workgroup: the most that fit the shared memory; Refusal when none do."""
    widest = min(32, max(TILE, power_above(op.value_dim)))
    for width in (32, 16, 8, 4):
        if width <= widest and scan_bytes(op, width) <= p.shared_bytes:
            return width
    raise Refusal(f"key_dim {op.key_dim}: chunks need more than {p.shared_bytes} bytes shared")


@schedule(KdaChunk, "gpu", "pairs of all chunks at once, then chunk by chunk per tile of columns")
def kda_chunk_gpu(op: KdaChunk, p: GpuProfile, a: SimpleNamespace) -> None:
    """Two launches: what does not see the state, and what does."""
    width = tile_width(op, p)
    tiles = -(-op.value_dim // width)
    pairs_of = pair_launch(op, a)
    per_sequence = op.heads * tiles
    with g.groups(a.m * T.int32(per_sequence), THREADS) as (group, tid):
        s, rest = g.let(group // T.int32(per_sequence)), g.let(group % T.int32(per_sequence))
        t = _Tile(
            op,
            a,
            pairs_of,
            width,
            slot=g.let(a.seqs[s, T.int32(0)]),
            head=g.let(rest // T.int32(tiles)),
            base=g.let(rest % T.int32(tiles) * T.int32(width)),
            tid=tid,
            state=g.shared(padded_keys(op) * width),
            operand=g.shared(operand_size(op)),
            pairs=g.shared(ROWS * ROW_WIDTH),
            surprise=g.shared(ROWS * width),
            write=g.shared(ROWS * width),
            total=g.shared(padded_keys(op)),
        )
        first, rows = g.let(a.seqs[s, T.int32(1)]), g.let(a.seqs[s, T.int32(2)])
        _each_state_row(t, lambda at, cell: _load_columns(t, a.state, at, t.state, cell))
        with g.serial((rows + T.int32(ROWS - 1)) // T.int32(ROWS)) as c:
            start = g.let(first + c * T.int32(ROWS))
            _chunk(t, start, g.let(T.min(rows - c * T.int32(ROWS), T.int32(ROWS))))
        _each_state_row(t, lambda at, cell: _store_columns(t, t.state, cell, a.state, at))


@schedule(KdaChunk, "gpu", "token by token, the state of a head in registers; for wide keys")
def kda_token_gpu(op: KdaChunk, p: GpuProfile, a: SimpleNamespace) -> None:
    """The recurrence as it stands."""
    run_steps(op, p, a)


def _chunk(t: _Tile, start: Any, count: Any) -> None:
    """Up to 16 rows of the sequence."""
    _mix(t, start, count)
    g.barrier()
    sums = _times_state(t)
    g.barrier()
    _share(t, sums)
    g.barrier()
    old = _old_values(t, start, count)
    g.barrier()
    _weigh_keys(t, start, count)
    _results(t, old, start, count)
    g.barrier()
    _update_state(t)
    g.barrier()


# --- columns of the state and of rows, four at a time where memory is aligned ---------------------


def _each_state_row(t: _Tile, body: Any) -> None:
    """body(index into the state tensor, index into the tile) for each four columns of a row."""
    with g.strided(t.tid, t.keys * t.groups, THREADS) as item:
        row = g.let(item // T.int32(t.groups))
        column = g.let(item % T.int32(t.groups) * T.int32(TILE))
        at = (g.wide(t.slot), t.head, row, g.let(t.base + column))
        body(at, g.let(row * T.int32(t.width) + column))


def _load_columns(t: _Tile, source: Any, at: tuple[Any, ...], target: Any, cell: Any) -> None:
    """target[cell : cell + 4] = source[at ...], zero outside of the state."""
    *_, row, column = at
    g.store(target, g.splat(0.0, TILE), cell, lanes=TILE)
    with g.when(row < T.int32(t.op.key_dim)):
        for lanes, offset in _columns(t):
            with g.when(column + T.int32(offset) < T.int32(t.op.value_dim)):
                value = g.load(source, *at[:-1], column + T.int32(offset), lanes=lanes)
                g.store(target, value, cell + T.int32(offset), lanes=lanes)


def _store_columns(t: _Tile, source: Any, cell: Any, target: Any, at: tuple[Any, ...]) -> None:
    """target[at ...] = source[cell : cell + 4], where the state has these columns."""
    *_, row, column = at
    with g.when(row < T.int32(t.op.key_dim)):
        for lanes, offset in _columns(t):
            with g.when(column + T.int32(offset) < T.int32(t.op.value_dim)):
                value = g.load(source, cell + T.int32(offset), lanes=lanes)
                g.store(target, value, *at[:-1], column + T.int32(offset), lanes=lanes)


def _columns(t: _Tile) -> list[tuple[int, int]]:
    """(lanes, offset) of the accesses to four columns."""
    return [(4, 0)] if t.op.value_dim % 4 == 0 else [(1, i) for i in range(4)]


def _result(t: _Tile, turn: int) -> tuple[Any, Any]:
    """(row of 32, first column in the tile) of one of a thread's results."""
    item = g.let(t.tid + T.int32(turn * THREADS))
    return g.let(item // T.int32(t.groups)), g.let(item % T.int32(t.groups) * T.int32(TILE))


# --- the stages of a chunk ------------------------------------------------------------------------


def _channels(t: _Tile) -> Any:
    return g.strided(t.tid, t.keys, THREADS)


def _inputs(t: _Tile, start: Any, count: Any, i: Any, d: Any) -> tuple[Any, Any, Any]:
    """Key, query and decay of row i at channel d; what does not exist changes nothing."""
    op, a = t.op, t.a
    exists = T.And(i < count, d < T.int32(op.key_dim))
    key, query, decay = g.variable(0.0), g.variable(0.0), g.variable(1.0)
    with g.when(exists):
        row, column = g.let(start + i), g.let(t.head * T.int32(op.key_dim) + d)
        g.put(key, a.qkv[row, column + T.int32(op.heads * op.key_dim)])
        g.put(query, a.qkv[row, column])
        g.put(decay, a.decay[row, column])
    return key[0], query[0], decay[0]


def _mix(t: _Tile, start: Any, count: Any) -> None:
    """A_i k_i and A_i q_i, not yet of unit length; the pairs of the chunk."""
    with _channels(t) as d:
        weight = g.variable(1.0)
        with g.serial(ROWS) as i:
            key, query, decay = _inputs(t, start, count, i, d)
            g.put(weight, weight[0] * decay)
            at = g.let(d * T.int32(MIXED) + i)
            g.store(t.operand, weight[0] * key, at)
            g.store(t.operand, weight[0] * query, at + T.int32(ROWS))
    with g.strided(t.tid, ROWS * ROW_WIDTH, THREADS) as item:
        i = g.let(item // T.int32(ROW_WIDTH))
        with g.when(i < count):
            value = t.pairs_of[start + i, t.head, item % T.int32(ROW_WIDTH)]
            g.store(t.pairs, value, item)


def _times_state(t: _Tile) -> list[Any]:
    """This thread's share of four rows and columns of `operand` times the state."""
    sums = [g.variable(g.splat(0.0, TILE)) for _ in range(TILE)]
    tile = t.tid % T.int32(THREADS // t.splits)
    first_row = g.let(tile // T.int32(t.groups) * T.int32(TILE))
    column = g.let(tile % T.int32(t.groups) * T.int32(TILE))
    length = t.keys // t.splits
    begin = g.let(t.tid // T.int32(THREADS // t.splits) * T.int32(length))
    with g.serial(length) as k:
        d = g.let(begin + k)
        state = g.let(g.load(t.state, d * T.int32(t.width) + column, lanes=TILE))
        mixed = g.let(g.load(t.operand, d * T.int32(MIXED) + first_row, lanes=TILE))
        for r, total in enumerate(sums):
            x = g.splat(g.lane(mixed, r), TILE)
            g.store(total, g.load(total, 0, lanes=TILE) + x * state, 0, lanes=TILE)
    return sums


def _share(t: _Tile, sums: list[Any]) -> None:
    """The shares [splits, 32, width] replace the operand."""
    tile = t.tid % T.int32(THREADS // t.splits)
    split = g.let(t.tid // T.int32(THREADS // t.splits))
    row = g.let(split * T.int32(2 * ROWS) + tile // T.int32(t.groups) * T.int32(TILE))
    column = g.let(tile % T.int32(t.groups) * T.int32(TILE))
    for r, total in enumerate(sums):
        at = (row + T.int32(r)) * T.int32(t.width) + column
        g.store(t.operand, g.load(total, 0, lanes=TILE), at, lanes=TILE)


def _old_values(t: _Tile, start: Any, count: Any) -> list[Any]:
    """Y to shared memory; what the queries read of the old state stays with the thread."""
    results = []
    for turn in range(t.turns):
        row, column = _result(t, turn)
        total = g.variable(g.splat(0.0, TILE))
        with g.when(row < T.int32(2 * ROWS)):
            with g.serial(t.splits) as split:
                at = (split * T.int32(2 * ROWS) + row) * T.int32(t.width) + column
                share = g.load(t.operand, at, lanes=TILE)
                g.store(total, g.load(total, 0, lanes=TILE) + share, 0, lanes=TILE)
            i = g.let(row % T.int32(ROWS))
            is_query = g.let(row // T.int32(ROWS))
            scale = g.let(t.pairs[i * T.int32(ROW_WIDTH) + T.int32(ROW_KEY) + is_query])
            value = g.let(g.load(total, 0, lanes=TILE) * g.splat(scale, TILE))
            g.store(total, value, 0, lanes=TILE)
            with g.when(is_query == T.int32(0)):
                _subtract_from_values(t, total, start, count, i, column)
                at = i * T.int32(t.width) + column
                g.store(t.surprise, g.load(total, 0, lanes=TILE), at, lanes=TILE)
        results.append(total)
    return results


def _subtract_from_values(
    t: _Tile, total: Any, start: Any, count: Any, i: Any, column: Any
) -> None:
    """total = v_i - total; values that do not exist are zero."""
    op = t.op
    values = g.variable(g.splat(0.0, TILE))
    for lanes, offset in _columns(t):
        at = g.let(t.base + column + T.int32(offset))
        with g.when(T.And(i < count, at < T.int32(op.value_dim))):
            source = t.head * T.int32(op.value_dim) + at + T.int32(2 * op.heads * op.key_dim)
            g.store(values, g.load(t.a.qkv, start + i, source, lanes=lanes), offset, lanes=lanes)
    difference = g.load(values, 0, lanes=TILE) - g.load(total, 0, lanes=TILE)
    g.store(total, difference, 0, lanes=TILE)


def _weigh_keys(t: _Tile, start: Any, count: Any) -> None:
    """(A_last / A_j) k_j, row by row, in place of the shares; and A_last."""
    with _channels(t) as d:
        weight = g.variable(1.0)
        with g.serial(ROWS) as i:
            j = g.let(T.int32(ROWS - 1) - i)
            key, _, decay = _inputs(t, start, count, j, d)
            g.store(t.operand, weight[0] * key, j * T.int32(t.keys + TILE) + d)
            g.put(weight, weight[0] * decay)
        g.store(t.total, weight[0], d)


def _results(t: _Tile, old: list[Any], start: Any, count: Any) -> None:
    """U to shared memory and O to its tensor: rows of T and W times Y."""
    for turn, total in enumerate(old):
        row, column = _result(t, turn)
        i, is_query = g.let(row % T.int32(ROWS)), g.let(row // T.int32(ROWS))
        with g.when(T.And(row < T.int32(2 * ROWS), i < count)):
            with g.when(is_query == T.int32(0)):
                g.store(total, g.splat(0.0, TILE), 0, lanes=TILE)
            pair_at = g.let(i * T.int32(ROW_WIDTH) + is_query * T.int32(ROW_W - ROW_T))
            with g.serial(i + T.int32(1)) as j:
                x = g.splat(g.let(t.pairs[pair_at + j]), TILE)
                y = g.load(t.surprise, j * T.int32(t.width) + column, lanes=TILE)
                g.store(total, g.load(total, 0, lanes=TILE) + x * y, 0, lanes=TILE)
            with T.If(is_query == T.int32(0)):
                with T.Then():
                    scale = g.let(t.pairs[i * T.int32(ROW_WIDTH) + T.int32(ROW_KEY)])
                    value = g.load(total, 0, lanes=TILE) * g.splat(scale, TILE)
                    g.store(t.write, value, i * T.int32(t.width) + column, lanes=TILE)
                with T.Else():
                    _store_outputs(t, total, start, i, column)
        with g.when(T.And(row < T.int32(ROWS), i >= count)):
            g.store(t.write, g.splat(0.0, TILE), i * T.int32(t.width) + column, lanes=TILE)


def _store_outputs(t: _Tile, total: Any, start: Any, i: Any, column: Any) -> None:
    """Four outputs, rounded."""
    op = t.op
    rounded = g.variable(g.splat(0.0, TILE))
    for k in range(TILE):
        g.put(rounded, f.rounded(op.act, total[T.int32(k)]), k)
    for lanes, offset in _columns(t):
        at = g.let(t.base + column + T.int32(offset))
        with g.when(at < T.int32(op.value_dim)):
            target = t.head * T.int32(op.value_dim) + at
            value = g.load(rounded, offset, lanes=lanes)
            g.store(t.a.out, value, start + i, target, lanes=lanes)


def _update_state(t: _Tile) -> None:
    """S = A_last S + the sum over the rows, 4 x 4 elements at a time."""
    with g.strided(t.tid, t.keys // TILE * t.groups, THREADS) as item:
        row = g.let(item // T.int32(t.groups) * T.int32(TILE))
        column = g.let(item % T.int32(t.groups) * T.int32(TILE))
        sums = []
        for r in range(TILE):
            at = g.let((row + T.int32(r)) * T.int32(t.width) + column)
            total = g.splat(g.let(t.total[row + T.int32(r)]), TILE)
            sums.append((at, g.variable(total * g.load(t.state, at, lanes=TILE))))
        with g.serial(ROWS) as j:
            keys = g.let(g.load(t.operand, j * T.int32(t.keys + TILE) + row, lanes=TILE))
            write = g.let(g.load(t.write, j * T.int32(t.width) + column, lanes=TILE))
            for r, (_, total) in enumerate(sums):
                x = g.splat(g.lane(keys, r), TILE)
                g.store(total, g.load(total, 0, lanes=TILE) + x * write, 0, lanes=TILE)
        for at, total in sums:
            g.store(t.state, g.load(total, 0, lanes=TILE), at, lanes=TILE)
