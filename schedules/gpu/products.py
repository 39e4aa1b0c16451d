"""Packed weights become float32 values in the registers of GPU threads.

Threads read 16 bytes at a time in every format (`k3tvm.schedules.layouts`), neighbours next to each
other. Such a unit holds, of one block of 16 rows:

    mxfp4     4 rows x 8 k
    bfloat16  rows r .. r+3 and r+8 .. r+11 of one k
    float32   4 rows of one k

MXFP4 codes are decoded by integer operations that need no subnormals: the table 0xC8643210 holds
2|v| of the eight magnitudes in its nibbles; put under the exponent of 2^22, whose last bit is worth
a half, it becomes 2^22 + |v|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import WeightFormat
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal

Expr = Any

BLOCK = 16  # rows of a packed block
GROUP = 32  # elements of k that share an MXFP4 scale
MAGNITUDES = 0xC8643210
MAGIC, MAGIC_BITS = 2.0**22, 0x4A800000
SIGN = 0x80000000
LEAST_SCALE = 0x00400000  # the bits of 2^-127, which is scale byte 0


@dataclass(frozen=True)
class Weights:
    """A packed matrix [*lead, rows, k] as kernel arguments."""

    fmt: WeightFormat
    k: int
    data: Any
    scale: Any = None

    @property
    def depth(self) -> int:
        """Elements of k in a unit."""
        return 8 if self.fmt == "mxfp4" else 1

    @property
    def units(self) -> int:
        """Steps of k in units."""
        return self.k // self.depth

    @property
    def quads(self) -> int:
        """Units that cover the 16 rows of a block."""
        return 2 if self.fmt == "bfloat16" else 4

    def rows(self, quad: Expr) -> list[Expr]:
        """The rows of a block that unit `quad` holds."""
        first = quad * T.int32(4)
        low = [first + T.int32(r) for r in range(4)]
        return low + [r + T.int32(8) for r in low] if self.fmt == "bfloat16" else low

    def unit(self, lead: Sequence[Expr], i: Expr, quad: Expr) -> tuple[Expr, list[Expr]]:
        """Load unit `quad` of step i: (16 bytes, the scales of its rows)."""
        at = quad * T.int32(4)
        words = T.Bind(g.load(self.data, *self.lead(lead), i, at, lanes=4))
        if self.fmt != "mxfp4":
            return words, []
        group = i // T.int32(GROUP // 8)
        four = T.Bind(g.load(self.scale, *self.lead(lead, self.scale), group, at, lanes=4))
        return words, [g.let(e8m0(g.lane(four, r))) for r in range(4)]

    def scale_of(self, lead: Sequence[Expr], group: Expr, row: Expr) -> Expr:
        """The scale of a group of k of one row."""
        return g.let(e8m0(g.load(self.scale, *self.lead(lead, self.scale), group, row)))

    def lead(self, index: Sequence[Expr], buffer: Any = None) -> list[Expr]:
        """Leading indices, the first in 64 bits where the tensor is that large."""
        buffer = self.data if buffer is None else buffer
        large = str(buffer.shape[0].ty) == "int64"
        return [g.wide(index[0]) if large else index[0], *index[1:]]

    def values(self, words: Expr) -> list[list[Expr]]:
        """The elements of a unit, unscaled: one list along k for each of its rows."""
        lanes = [g.lane(words, r) for r in range(4)]
        if self.fmt == "float32":
            return [[lane] for lane in lanes]
        lanes = [g.let(lane) for lane in lanes]
        if self.fmt == "bfloat16":
            return [[low_half(lane)] for lane in lanes] + [[high_half(lane)] for lane in lanes]
        return [e2m1(lane) for lane in lanes]


def weights_of(fmt: WeightFormat, k: int, p: GpuProfile, args: Any) -> Weights:
    """The weight among the arguments of an operator; refuses what the device cannot read."""
    if fmt == "mxfp4" and "storage8" not in p.features:
        raise Refusal("MXFP4 scales are bytes, the device has no 8-bit storage")
    return Weights(fmt, k, args.weight, getattr(args, "weight_scale", None))


def e8m0(byte: Expr) -> Expr:
    """2^(byte - 127), exact for all bytes 0 to 254."""
    shifted = g.cast(byte, "int32") << T.int32(23)
    return g.bits(T.max(shifted, T.int32(LEAST_SCALE)), "float32")


def low_half(word: Expr) -> Expr:
    """The bfloat16 in the low half of a word."""
    return g.bits(word << T.uint32(16), "float32")


def high_half(word: Expr) -> Expr:
    """The bfloat16 in the high half of a word."""
    return g.bits(T.bitwise_and(word, T.uint32(0xFFFF0000)), "float32")


def e2m1(word: Expr) -> list[Expr]:
    """The eight values of a word of MXFP4 codes, in the order of k."""
    return [_e2m1(word, 8 * (j % 4) + 4 * (j // 4)) for j in range(8)]


def _e2m1(word: Expr, shift: int) -> Expr:
    """The value of the code whose lowest bit is bit `shift`; exact, no subnormals on the way."""
    nibble = word >> T.uint32(shift - 2) if shift else word << T.uint32(2)
    double = T.uint32(MAGNITUDES) >> T.bitwise_and(nibble, T.uint32(7 << 2))
    under = T.bitwise_or(T.bitwise_and(double, T.uint32(15)), T.uint32(MAGIC_BITS))
    magnitude = g.bits(under, "float32") - g.floats(MAGIC)
    sign = T.bitwise_and(word << T.uint32(28 - shift) if shift < 28 else word, T.uint32(SIGN))
    return g.bits(T.bitwise_xor(g.bits(magnitude, "uint32"), sign), "float32")
