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

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
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
from k3tvm.schedules.gpu.kda_step import run_steps
from k3tvm.schedules.gpu.kda_tile import (
    MIXED,
    THREADS,
    TILE,
    Tile,
    columns_of,
    each_state_row,
    load_columns,
    operand_size,
    padded_keys,
    result_of,
    store_columns,
    tile_width,
)
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule


@schedule(KdaChunk, "gpu", "pairs of all chunks at once, then chunk by chunk per tile of columns")
def kda_chunk_gpu(op: KdaChunk, p: GpuProfile, a: SimpleNamespace) -> None:
    """Two launches: what does not see the state, and what does."""
    width = tile_width(op, p)
    tiles = -(-op.value_dim // width)
    pairs_of = pair_launch(op, a)
    per_sequence = op.heads * tiles
    with g.groups(a.m * T.int32(per_sequence), THREADS) as (group, tid):
        s, rest = g.let(group // T.int32(per_sequence)), g.let(group % T.int32(per_sequence))
        t = Tile(
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
        each_state_row(t, lambda at, cell: load_columns(t, a.state, at, t.state, cell))
        with g.serial((rows + T.int32(ROWS - 1)) // T.int32(ROWS)) as c:
            start = g.let(first + c * T.int32(ROWS))
            _chunk(t, start, g.let(T.min(rows - c * T.int32(ROWS), T.int32(ROWS))))
        each_state_row(t, lambda at, cell: store_columns(t, t.state, cell, a.state, at))


@schedule(KdaChunk, "gpu", "token by token, the state of a head in registers; for wide keys")
def kda_token_gpu(op: KdaChunk, p: GpuProfile, a: SimpleNamespace) -> None:
    """The recurrence as it stands."""
    run_steps(op, p, a)


def _chunk(t: Tile, start: Any, count: Any) -> None:
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
    _update_state(t, count)
    g.barrier()


def _channels(t: Tile) -> Any:
    return g.strided(t.tid, t.keys, THREADS)


def _inputs(t: Tile, row: Any, d: Any) -> tuple[Any, Any, Any]:
    """Key, query and decay of a row at channel d; channels that do not exist change nothing."""
    op, a = t.op, t.a
    key, query, decay = g.variable(0.0), g.variable(0.0), g.variable(1.0)
    with g.when(d < T.int32(op.key_dim)):
        column = g.let(t.head * T.int32(op.key_dim) + d)
        g.put(key, a.qkv[row, column + T.int32(op.heads * op.key_dim)])
        g.put(query, a.qkv[row, column])
        g.put(decay, a.decay[row, column])
    return key[0], query[0], decay[0]


def _mix(t: Tile, start: Any, count: Any) -> None:
    """A_i k_i and A_i q_i, not yet of unit length; the pairs of the chunk.

    What is left in rows past the chunk gives results that nothing reads.
    """
    with _channels(t) as d:
        weight = g.variable(1.0)
        with g.serial(count) as i:
            key, query, decay = _inputs(t, g.let(start + i), d)
            g.put(weight, weight[0] * decay)
            at = g.let(d * T.int32(MIXED) + i)
            g.store(t.operand, weight[0] * key, at)
            g.store(t.operand, weight[0] * query, at + T.int32(ROWS))
    with g.strided(t.tid, ROWS * ROW_WIDTH, THREADS) as item:
        i = g.let(item // T.int32(ROW_WIDTH))
        with g.when(i < count):
            value = t.pairs_of[start + i, t.head, item % T.int32(ROW_WIDTH)]
            g.store(t.pairs, value, item)


def _times_state(t: Tile) -> list[Any]:
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


def _share(t: Tile, sums: list[Any]) -> None:
    """The shares [splits, 32, width] replace the operand."""
    tile = t.tid % T.int32(THREADS // t.splits)
    split = g.let(t.tid // T.int32(THREADS // t.splits))
    row = g.let(split * T.int32(2 * ROWS) + tile // T.int32(t.groups) * T.int32(TILE))
    column = g.let(tile % T.int32(t.groups) * T.int32(TILE))
    for r, total in enumerate(sums):
        at = (row + T.int32(r)) * T.int32(t.width) + column
        g.store(t.operand, g.load(total, 0, lanes=TILE), at, lanes=TILE)


def _old_values(t: Tile, start: Any, count: Any) -> list[Any]:
    """Y to shared memory; what the queries read of the old state stays with the thread."""
    results = []
    for turn in range(t.turns):
        row, column = result_of(t, turn)
        total = g.variable(g.splat(0.0, TILE))
        with g.when(row < T.int32(2 * ROWS)):
            with g.serial(t.splits) as split:
                at = (split * T.int32(2 * ROWS) + row) * T.int32(t.width) + column
                share = g.load(t.operand, at, lanes=TILE)
                g.store(total, g.load(total, 0, lanes=TILE) + share, 0, lanes=TILE)
            i = g.let(row % T.int32(ROWS))
            is_query = g.let(row // T.int32(ROWS))
            scale = g.let(
                t.pairs[
                    i * T.int32(ROW_WIDTH)
                    + T.int32(ROW_KEY)
                    + is_query * T.int32(ROW_QUERY - ROW_KEY)
                ]
            )
            value = g.let(g.load(total, 0, lanes=TILE) * g.splat(scale, TILE))
            g.store(total, value, 0, lanes=TILE)
            with g.when(is_query == T.int32(0)):
                _subtract_from_values(t, total, start, count, i, column)
                at = i * T.int32(t.width) + column
                g.store(t.surprise, g.load(total, 0, lanes=TILE), at, lanes=TILE)
        results.append(total)
    return results


def _subtract_from_values(t: Tile, total: Any, start: Any, count: Any, i: Any, column: Any) -> None:
    """total = v_i - total; values that do not exist are zero."""
    op = t.op
    values = g.variable(g.splat(0.0, TILE))
    with columns_of(t) as (lanes, offset):
        at = g.let(t.base + column + offset)
        with g.when(T.And(i < count, at < T.int32(op.value_dim))):
            source = t.head * T.int32(op.value_dim) + at + T.int32(2 * op.heads * op.key_dim)
            g.store(values, g.load(t.a.qkv, start + i, source, lanes=lanes), offset, lanes=lanes)
    difference = g.load(values, 0, lanes=TILE) - g.load(total, 0, lanes=TILE)
    g.store(total, difference, 0, lanes=TILE)


def _weigh_keys(t: Tile, start: Any, count: Any) -> None:
    """(A_last / A_j) k_j, row by row, in place of the shares; and A_last."""
    with _channels(t) as d:
        weight = g.variable(1.0)
        with g.serial(count) as i:
            j = g.let(count - T.int32(1) - i)
            key, _, decay = _inputs(t, g.let(start + j), d)
            g.store(t.operand, weight[0] * key, j * T.int32(t.keys + TILE) + d)
            g.put(weight, weight[0] * decay)
        g.store(t.total, weight[0], d)


def _results(t: Tile, old: list[Any], start: Any, count: Any) -> None:
    """U to shared memory and O to its tensor: rows of T and W times Y."""
    for turn, total in enumerate(old):
        row, column = result_of(t, turn)
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


def _store_outputs(t: Tile, total: Any, start: Any, i: Any, column: Any) -> None:
    """Four outputs, rounded."""
    op = t.op
    rounded = g.variable(g.splat(0.0, TILE))
    for k in range(TILE):
        g.put(rounded, g.rounded(op.act, total[T.int32(k)]), k)
    with columns_of(t) as (lanes, offset):
        at = g.let(t.base + column + offset)
        with g.when(at < T.int32(op.value_dim)):
            target = t.head * T.int32(op.value_dim) + at
            value = g.load(rounded, offset, lanes=lanes)
            g.store(t.a.out, value, start + i, target, lanes=lanes)


def _update_state(t: Tile, count: Any) -> None:
    """S = A_last S + the sum over the rows, 4 x 4 elements at a time."""
    with g.strided(t.tid, t.keys // TILE * t.groups, THREADS) as item:
        row = g.let(item // T.int32(t.groups) * T.int32(TILE))
        column = g.let(item % T.int32(t.groups) * T.int32(TILE))
        sums = []
        for r in range(TILE):
            at = g.let((row + T.int32(r)) * T.int32(t.width) + column)
            total = g.splat(g.let(t.total[row + T.int32(r)]), TILE)
            sums.append((at, g.variable(total * g.load(t.state, at, lanes=TILE))))
        with g.serial(count) as j:
            keys = g.let(g.load(t.operand, j * T.int32(t.keys + TILE) + row, lanes=TILE))
            write = g.let(g.load(t.write, j * T.int32(t.width) + column, lanes=TILE))
            for r, (_, total) in enumerate(sums):
                x = g.splat(g.lane(keys, r), TILE)
                g.store(total, g.load(total, 0, lanes=TILE) + x * write, 0, lanes=TILE)
        for at, total in sums:
            g.store(t.state, g.load(total, 0, lanes=TILE), at, lanes=TILE)
