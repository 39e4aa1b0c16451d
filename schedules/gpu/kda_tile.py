"""Value columns of one head's state on a GPU: their memory in a workgroup, and the way to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.kda_pairs import ROW_WIDTH, ROWS
from k3tvm.schedules.gpu.kda_split import power_above
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal

MIXED = 2 * ROWS + 4  # a key channel in `operand`: 16 keys, 16 queries; neighbours in other banks
TILE = 4  # rows and columns of the products in registers
THREADS = 128


def padded_keys(op: KdaChunk) -> int:
    """key_dim rounded up to what the stages divide it by."""
    return -(-op.key_dim // 16) * 16


@dataclass(frozen=True)
class Tile:
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


def each_state_row(t: Tile, body: Any) -> None:
    """body(index into the state tensor, index into the tile) for each four columns of a row."""
    with g.strided(t.tid, t.keys * t.groups, THREADS) as item:
        row = g.let(item // T.int32(t.groups))
        column = g.let(item % T.int32(t.groups) * T.int32(TILE))
        at = (g.wide(t.slot), t.head, row, g.let(t.base + column))
        body(at, g.let(row * T.int32(t.width) + column))


def load_columns(t: Tile, source: Any, at: tuple[Any, ...], target: Any, cell: Any) -> None:
    """target[cell : cell + 4] = source[at ...], zero outside of the state."""
    *lead, row, column = at
    if t.keys > t.op.key_dim or t.op.value_dim % t.width:
        g.store(target, g.splat(0.0, TILE), cell, lanes=TILE)
    with g.when(row < T.int32(t.op.key_dim)), columns_of(t) as (lanes, offset):
        with g.when(column + offset < T.int32(t.op.value_dim)):
            value = g.load(source, *lead, row, column + offset, lanes=lanes)
            g.store(target, value, cell + offset, lanes=lanes)


def store_columns(t: Tile, source: Any, cell: Any, target: Any, at: tuple[Any, ...]) -> None:
    """target[at ...] = source[cell : cell + 4], where the state has these columns."""
    *lead, row, column = at
    with g.when(row < T.int32(t.op.key_dim)), columns_of(t) as (lanes, offset):
        with g.when(column + offset < T.int32(t.op.value_dim)):
            value = g.load(source, cell + offset, lanes=lanes)
            g.store(target, value, *lead, row, column + offset, lanes=lanes)


@contextmanager
def columns_of(t: Tile) -> Iterator[tuple[int, Any]]:
    """Four columns as (lanes, offset): at once, or one by one where rows are not aligned."""
    if t.op.value_dim % TILE == 0:
        yield TILE, T.int32(0)
    else:
        with g.serial(TILE) as offset:
            yield 1, offset


def result_of(t: Tile, turn: int) -> tuple[Any, Any]:
    """(row of 32, first column in the tile) of one of a thread's results."""
    item = g.let(t.tid + T.int32(turn * THREADS))
    return g.let(item // T.int32(t.groups)), g.let(item % T.int32(t.groups) * T.int32(TILE))
