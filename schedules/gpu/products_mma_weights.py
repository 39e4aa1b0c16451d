"""Packed weights in shared memory become the left fragments of mma.m16n8k16 in a warp's registers.

A lane of a warp is (pick, t) = (lane // 4, lane % 4). A fragment has two rows of each pick and the
k of t; which ones is free as long as x has the same k, so every lane takes what 16 bytes of the
packed layout hold (`k3tvm.schedules.layouts`), and no lane decodes for another:

    bfloat16  8 loads: rows 4 q ... 4 q + 3 and + 8, q = pick % 2, of block pick // 2; k = 4 j + t
    mxfp4     1 load: rows 4 q ... 4 q + 3, q = pick % 4, of block pick // 4; k = 8 t ... 8 t + 7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from k3tvm._tvm import T
from k3tvm.relax_models.operators import WeightFormat
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK, e8m0
from k3tvm.schedules.gpu.products_split import STEP
from k3tvm.schedules.gpu.products_tile import Tile

Expr = Any

TILES = 4  # fragments of 16 rows that a warp has
HALVES = 2  # of a step: the 16 k of one product
CHUNK = 4  # words of 16 bytes
QUADS = BLOCK // 4


@dataclass(frozen=True)
class Lanes:
    """Where a thread is: its warp's first block in the tile, and (pick, t) in the warp."""

    block: Expr
    pick: Expr
    t: Expr


@dataclass(frozen=True)
class Copies:
    """`count` copies of 16 bytes; one(step, i): (what is in device memory, word in the stage)."""

    count: int
    one: Callable[[Expr, Expr], tuple[Expr, Expr]]


class Form(Protocol):
    """A weight format; shared memory of a stage has `block_words` for each block of 16 rows."""

    block_words: int

    def copies(self, tile: Tile, blocks: int) -> list[Copies]:
        """What fills a stage with the weights of `blocks` blocks."""

    def fragments(self, pool: Any, base: Expr, at: Lanes, blocks: int, a: Any) -> list[list[Expr]]:
        """Put a[tile][half][4] of the stage at `base`; the scales of each tile's rows, if any."""

    def quads(self, at: Lanes) -> list[tuple[Expr, list[tuple[int, int]]]]:
        """Results by four consecutive rows: (the first, [(fragment, place of its row's sums)])."""


class Bfloat16:
    """[b, k, 8 words]: 1 KiB of a block is consecutive in a step."""

    block_words = STEP * BLOCK // 2

    def copies(self, tile: Tile, blocks: int) -> list[Copies]:
        """A copy is half of one k of a block; past the end of k it is the last, x is zero there."""
        chunks = self.block_words // CHUNK

        def one(step: Expr, i: Expr) -> tuple[Expr, Expr]:
            block, chunk = g.let(i // T.int32(chunks)), g.let(i % T.int32(chunks))
            k = step * T.int32(STEP) + chunk // T.int32(2)
            if tile.weights.k % STEP:
                k = T.min(k, T.int32(tile.weights.k - 1))
            lead = tile.weights.lead(tile.lead(_block(tile, block, blocks)))
            quad = chunk % T.int32(2) * T.int32(CHUNK)
            return tile.weights.data[(*lead, g.let(k), quad)], i * T.int32(CHUNK)

        return [Copies(blocks * chunks, one)]

    def fragments(self, pool: Any, base: Expr, at: Lanes, blocks: int, a: Any) -> list[list[Expr]]:
        """Two words of neighbouring k make a pair of the lower and one of the upper row."""
        quad = at.pick % T.int32(2)
        block = g.let(base + (at.block + at.pick // T.int32(2)) * T.int32(self.block_words))
        for half in range(HALVES):
            columns = []
            for j in range(4 * half, 4 * half + 4):
                chunk = (T.int32(4 * j) + at.t) * T.int32(2) + quad
                columns.append(T.Bind(g.load(pool, block + chunk * T.int32(CHUNK), lanes=4)))
            for i in range(TILES):
                words = [g.lane(c, i) for c in columns]
                pairs = [
                    T.call_pure_extern("uint32", f"k3_{which}_halves", *words[j : j + 2])
                    for j in (0, 2)
                    for which in ("low", "high")
                ]
                _put_all(a, pairs, (i * HALVES + half) * 4)
        return []

    def quads(self, at: Lanes) -> list[tuple[Expr, list[tuple[int, int]]]]:
        """Fragment i has row i of each quad of four, and that row + 8."""
        block = (at.block + at.pick // T.int32(2)) * T.int32(BLOCK)
        first = g.let(block + at.pick % T.int32(2) * T.int32(4))
        return [
            (first, [(i, 0) for i in range(TILES)]),
            (g.let(first + T.int32(8)), [(i, 2) for i in range(TILES)]),
        ]


class Mxfp4:
    """[b, k/8, 16 words] and [b, k/32, 16 scales]: 256 and 16 bytes of a block in a step."""

    data_words = STEP // 8 * BLOCK
    block_words = data_words + BLOCK // 4

    def copies(self, tile: Tile, blocks: int) -> list[Copies]:
        """The words of a quad stand together, so that eight lanes read from all banks."""
        w, chunks = tile.weights, self.data_words // CHUNK

        def data(step: Expr, i: Expr) -> tuple[Expr, Expr]:
            block, chunk = g.let(i // T.int32(chunks)), g.let(i % T.int32(chunks))
            word, quad = g.let(chunk // T.int32(QUADS)), g.let(chunk % T.int32(QUADS))
            lead = w.lead(tile.lead(_block(tile, block, blocks)))
            source = w.data[(*lead, step * T.int32(STEP // 8) + word, quad * T.int32(CHUNK))]
            place = block * T.int32(chunks) + quad * T.int32(STEP // 8) + word
            return source, place * T.int32(CHUNK)

        def scales(step: Expr, i: Expr) -> tuple[Expr, Expr]:
            lead = w.lead(tile.lead(_block(tile, i, blocks)), w.scale)
            place = T.int32(blocks * self.data_words) + i * T.int32(CHUNK)
            return w.scale[(*lead, step, T.int32(0))], place

        return [Copies(blocks * chunks, data), Copies(blocks, scales)]

    def fragments(self, pool: Any, base: Expr, at: Lanes, blocks: int, a: Any) -> list[list[Expr]]:
        """A quad has the rows of two fragments."""
        factors = []
        for unit in range(TILES // 2):
            quad = self._quad(at, unit)
            chunk = quad * T.int32(STEP // 8) + at.t
            words = T.Bind(g.load(pool, base + chunk * T.int32(CHUNK), lanes=4))
            four = g.let(pool[base + T.int32(blocks * self.data_words) + quad])
            pairs = [_halves(g.let(g.lane(words, i))) for i in range(4)]
            for m in range(2):
                low, high = pairs[2 * m], pairs[2 * m + 1]
                for half in range(HALVES):
                    both = [p[2 * half + i] for i in range(2) for p in (low, high)]
                    _put_all(a, both, ((2 * unit + m) * HALVES + half) * 4)
                bytes_ = [(four >> T.uint32(8 * (2 * m + i))) for i in range(2)]
                factors.append([g.let(e8m0(T.bitwise_and(b, T.uint32(255)))) for b in bytes_])
        return factors

    def quads(self, at: Lanes) -> list[tuple[Expr, list[tuple[int, int]]]]:
        """Two fragments have two rows each of every quad."""
        return [
            (
                g.let(self._quad(at, unit) * T.int32(4)),
                [(2 * unit + m, place) for m in range(2) for place in (0, 2)],
            )
            for unit in range(TILES // 2)
        ]

    @staticmethod
    def _quad(at: Lanes, unit: int) -> Expr:
        """Number in the tile of the quad of rows that a lane has in a unit of two blocks."""
        block = at.block + T.int32(2 * unit) + at.pick // T.int32(4)
        return g.let(block * T.int32(QUADS) + at.pick % T.int32(4))


FORMS: dict[WeightFormat, Form] = {"bfloat16": Bfloat16(), "mxfp4": Mxfp4()}


def _block(tile: Tile, i: Expr, blocks: int) -> Expr:
    """Block i of a tile; the last one stands for those past the end, where tiles have any."""
    return g.let(tile.block(i) if tile.blocks % blocks else tile.first + i)


def _put_all(cells: Any, values: Sequence[Expr], first: int) -> None:
    for i, value in enumerate(values):
        g.put(cells, value, first + i)


def _halves(word: Expr) -> list[Expr]:
    """2^-14 of the codes (0, 2), (1, 3), (4, 6) and (5, 7) of a word, as pairs of float16.

    The three bits of a magnitude become the last of the exponent and the first of the mantissa;
    0.5 is a subnormal float16, which tensor cores take like any other.
    """
    pairs = []
    for size, sign in ((9, 12), (1, 4), (5, 8), (-3, 0)):
        moved = word << T.uint32(size) if size > 0 else word >> T.uint32(-size)
        signs = T.bitwise_and(word << T.uint32(sign) if sign else word, T.uint32(0x80008000))
        pairs.append(g.let(T.bitwise_or(T.bitwise_and(moved, T.uint32(0x0E000E00)), signs)))
    return pairs
