"""Spans that kernels walk: the rows of a sequence, and a static width in vectors with a tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3tvm.schedules import vector as v

Expr = Any
Pieces = list[tuple[int, int]]  # (offset, lanes) of each vector of a tile


def sequence(seqs: Any, index: Expr) -> tuple[Expr, Expr, Expr]:
    """(slot, first row, rows) of sequence `index` of seqs [m, 4], as 64-bit integers."""
    slot, first, rows = (v.let(v.cast(seqs[index, v.int64(i)], "int64", 1)) for i in range(3))
    return slot, first, rows


def along(width: int, piece: Callable[[Expr, int], None]) -> None:
    """Emit piece(offset, lanes) over a static width: a loop of full vectors, then the tail."""
    whole = width // v.LANES
    if whole:
        with v.serial(whole) as i:
            piece(v.let(i * v.LANES), v.LANES)
    for at, lanes in v.chunks(width - whole * v.LANES):
        piece(v.int64(whole * v.LANES + at), lanes)


def tiles(width: int, vectors: int, body: Callable[[Expr, Pieces], None]) -> None:
    """Emit body(offset, pieces) over a static width, at most `vectors` vectors at a time.

    `pieces` are the (offset in the tile, lanes) of its vectors: whole tiles in a loop, then the
    rest, whose last vectors are shorter.
    """
    tile = vectors * v.LANES
    whole = width // tile
    if whole:
        with v.serial(whole) as i:
            body(v.let(i * tile), v.chunks(tile))
    rest = v.chunks(width - whole * tile)
    for first in range(0, len(rest), vectors):
        some = rest[first : first + vectors]
        start = some[0][0]
        body(v.int64(whole * tile + start), [(at - start, lanes) for at, lanes in some])
