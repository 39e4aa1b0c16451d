"""Register tiles over packed weights: a block times one row, a group of blocks times many rows.

Everything that multiplies weights on the CPU is made of two pieces. `matvec` streams one 16-row
block against one row of x; the weights are decoded in registers. `matmul` decodes a slice of a
group of blocks into the L1 cache once, and multiplies it with all rows in register tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import WeightFormat
from k3tvm.schedules import mxfp4_cpu
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import CpuProfile

Finish = Callable[[Any, int, Any], None]
CHAINS = 4  # independent sums per vector: covers the latency of the multiply-add
SLICE = 128  # length of one such sum before it is added to the total


@dataclass(frozen=True)
class Weights:
    """A packed weight inside a kernel: its format, its k, and its buffers."""

    fmt: WeightFormat
    k: int
    profile: CpuProfile
    words: Any
    scale: Any = None


@dataclass(frozen=True)
class Tile:
    """Shape of the register tile: blocks of 16 weight rows, rows of x, and k decoded at a time."""

    blocks: int
    rows: tuple[int, ...]
    depth: int


def tile_of(profile: CpuProfile) -> Tile:
    """What fits the registers: 24 + 2 of 32 zmm, 12 + 2 of 16 ymm (two a vector), 8 + 4 of 16 xmm.

    The decoded slice takes half of a 32 KiB L1 cache at most; short slices also are more accurate.
    """
    if profile.isa == "avx512":
        return Tile(2, (12, 4, 1), 128)
    return Tile(1, (6, 2, 1) if profile.isa == "avx2" else (2, 1), 128)


# --- one block, one row -------------------------------------------------------------------------


def matvec(w: Weights, lead: tuple[Any, ...], x: Any, row: Any, offset: Any) -> Any:
    """Block `lead` of the weight times x[row, offset : offset + k]: 16 sums, one per weight row."""
    body = {"float32": _matvec_f32, "bfloat16": _matvec_bf16, "mxfp4": _matvec_mxfp4}[w.fmt]
    return body(w, lead, x, row, offset)


def _zeros(count: int, lanes: int) -> list[Any]:
    sums = [v.scratch(lanes) for _ in range(count)]
    for s in sums:
        v.store(s, v.splat(0.0, lanes), 0, lanes=lanes)
    return sums


def _accumulate(w: Weights, acc: Any, a: Any, b: Any, lanes: int) -> None:
    v.store(acc, v.fma(w.profile, a, b, v.load(acc, 0, lanes=lanes), lanes), 0, lanes=lanes)


def _drain(sums: list[Any], total: Any, lanes: int) -> None:
    """total += the sums, which begin again at zero."""
    values = [v.load(s, 0, lanes=lanes) for s in sums]
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    v.store(total, v.load(total, 0, lanes=lanes) + values[0], 0, lanes=lanes)
    for s in sums:
        v.store(s, v.splat(0.0, lanes), 0, lanes=lanes)


def _in_slices(
    k: int, step: Callable[[Any, int], None], groups: list[tuple[list[Any], Any]], lanes: int
) -> None:
    """step(k, chain) for all k; after every slice each group's sums are drained into its total.

    Short sums keep rounding errors from piling up; a slice is long enough to cost nothing.
    """
    slice_length = SLICE * CHAINS

    def run(start: Any, count: int) -> None:
        with v.serial(count // CHAINS) as i:
            for c in range(CHAINS):
                step(start + i * CHAINS + c, c)
        for c in range(count % CHAINS):
            step(start + (count // CHAINS * CHAINS + c), c)
        for sums, total in groups:
            _drain(sums, total, lanes)

    with v.serial(k // slice_length) as s:
        run(s * slice_length, slice_length)
    if k % slice_length:
        run(v.int64(k // slice_length * slice_length), k % slice_length)


def _matvec_f32(w: Weights, lead: tuple[Any, ...], x: Any, row: Any, offset: Any) -> Any:
    sums, (total,) = _zeros(CHAINS, v.LANES), _zeros(1, v.LANES)

    def step(k: Any, chain: int) -> None:
        xk = v.splat(v.load(x, row, offset + k, lanes=1))
        _accumulate(w, sums[chain], v.load(w.words, *lead, k, 0), xk, v.LANES)

    _in_slices(w.k, step, [(sums, total)], v.LANES)
    return v.let(v.load(total, 0))


def _matvec_bf16(w: Weights, lead: tuple[Any, ...], x: Any, row: Any, offset: Any) -> Any:
    low, high = _zeros(CHAINS, 8), _zeros(CHAINS, 8)
    totals = _zeros(2, 8)

    def step(k: Any, chain: int) -> None:
        word = v.let(v.load(w.words, *lead, k, 0, lanes=8))
        xk = v.let(v.splat(v.load(x, row, offset + k, lanes=1), 8))
        first, second = v.bf16_pair(word)
        _accumulate(w, low[chain], first, xk, 8)
        _accumulate(w, high[chain], second, xk, 8)

    _in_slices(w.k, step, [(low, totals[0]), (high, totals[1])], 8)
    first, second = (v.load(t, 0, lanes=8) for t in totals)
    return v.let(v.concat(first, second, 8))


def _matvec_mxfp4(w: Weights, lead: tuple[Any, ...], x: Any, row: Any, offset: Any) -> Any:
    total = _zeros(1, v.LANES)[0]
    with v.serial(w.k // 32) as block:
        sums: list[Any] = [None] * CHAINS
        for i in range(4):
            word = v.let(v.load(w.words, *lead, block * 4 + i, 0))
            for e, value in enumerate(mxfp4_cpu.elements(w.profile, word)):
                xk = v.splat(v.load(x, row, offset + block * 32 + (i * 8 + e), lanes=1))
                c = e % CHAINS
                product = value * xk if sums[c] is None else v.fma(w.profile, value, xk, sums[c])
                sums[c] = v.let(product)
        part = (sums[0] + sums[1]) + (sums[2] + sums[3])
        _accumulate(w, total, part, mxfp4_cpu.scale_vector(w.scale, *lead, block, 0), v.LANES)
    return v.let(v.load(total, 0))


# --- a group of blocks, many rows ---------------------------------------------------------------


def matmul(
    w: Weights,
    leads: list[tuple[Any, ...]],
    x: Any,
    first_row: Any,
    rows: Any,
    most_rows: Any,
    offset: Any,
    finish: Finish,
) -> None:
    """finish(i, g, sums) for the rows first_row + i of x, i < rows, and every block g of `leads`.

    `x` is [*, width] read at `offset`; sums has 16 lanes. Partial sums over slices of k are kept
    in a workspace [most_rows, blocks*16] of float32; `most_rows` must be known outside of all
    loops, since TVM moves allocations there.
    """
    tile, width = tile_of(w.profile), len(leads) * v.LANES
    depth = min(tile.depth, w.k)
    sums = v.workspace([most_rows, width])
    decoded = v.workspace([depth, width])
    with v.serial(rows) as i:
        for g in range(len(leads)):
            v.store(sums, v.splat(0.0), i, g * v.LANES)
    with v.serial(-(-w.k // depth)) as s:
        k0 = v.let(s * depth)
        length = depth if w.k % depth == 0 else v.let(T.min(v.int64(depth), w.k - k0))
        for g, lead in enumerate(leads):
            _decode(w, lead, k0, length, decoded, g * v.LANES)
        _tiles(w, tile.rows, decoded, sums, x, first_row, rows, offset + k0, length, len(leads))
    with v.serial(rows) as i:
        for g in range(len(leads)):
            finish(i, g, v.let(v.load(sums, i, g * v.LANES)))


def _tiles(
    w: Weights,
    heights: tuple[int, ...],
    decoded: Any,
    sums: Any,
    x: Any,
    first_row: Any,
    rows: Any,
    offset: Any,
    length: Any,
    groups: int,
) -> None:
    """Cover the rows with the tallest tiles first; each height takes what the taller ones left."""
    done = v.int64(0)
    for height in heights:
        count = v.let((rows - done) // height)
        with v.serial(count) as t:
            start = v.let(done + t * height)
            _tile(w, height, decoded, sums, x, first_row, start, offset, length, groups)
        done = v.let(done + count * height)


def _tile(
    w: Weights,
    height: int,
    decoded: Any,
    sums: Any,
    x: Any,
    first_row: Any,
    start: Any,
    offset: Any,
    length: Any,
    groups: int,
) -> None:
    cells = [[v.scratch(v.LANES) for _ in range(groups)] for _ in range(height)]
    for row_cells in cells:
        for cell in row_cells:
            v.store(cell, v.splat(0.0), 0)
    with v.serial(length) as k:
        weights = [v.let(v.load(decoded, k, g * v.LANES)) for g in range(groups)]
        for m, row_cells in enumerate(cells):
            xk = v.let(v.splat(v.load(x, first_row + start + m, offset + k, lanes=1)))
            for g, cell in enumerate(row_cells):
                _accumulate(w, cell, weights[g], xk, v.LANES)
    for m, row_cells in enumerate(cells):
        for g, cell in enumerate(row_cells):
            # each slice of k has its own short sum, so that rounding errors do not pile up
            total = v.load(sums, start + m, g * v.LANES) + v.load(cell, 0)
            v.store(sums, total, start + m, g * v.LANES)


def _decode(w: Weights, lead: tuple[Any, ...], k0: Any, length: Any, out: Any, column: int) -> None:
    """out[k, column : column+16] = weight block `lead` at k0 + k, float32, for k < length."""
    if w.fmt == "float32":
        with v.serial(length) as k:
            v.store(out, v.load(w.words, *lead, k0 + k, 0), k, column)
    elif w.fmt == "bfloat16":
        with v.serial(length) as k:
            low, high = v.bf16_pair(v.let(v.load(w.words, *lead, k0 + k, 0, lanes=8)))
            v.store(out, low, k, column, lanes=8)
            v.store(out, high, k, column + 8, lanes=8)
    else:
        with v.serial(length // 32) as b:
            block = v.let(k0 // 32 + b)
            scale = v.let(mxfp4_cpu.scale_vector(w.scale, *lead, block, 0))
            for i in range(4):
                word = v.let(v.load(w.words, *lead, block * 4 + i, 0))
                for e, value in enumerate(mxfp4_cpu.elements(w.profile, word)):
                    v.store(out, value * scale, b * 32 + (i * 8 + e), column)
