"""MXFP4 words into float32 vectors on the CPU: one decoder per instruction set.

A word of the packed layout holds eight consecutive k of one output row: byte j has element j in
its low nibble and element j + 4 in its high one; 16 words are 16 rows. Every decoder is exact: an
E2M1 code is a float32, and the block scale 2^(s-127) is applied once per 32 k (specification 4).
"""

from __future__ import annotations

from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import CpuProfile

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def shift_of(element: int) -> int:
    """Bit position of element 0..7 of a word."""
    return 8 * element if element < 4 else 8 * (element - 4) + 4


def scale_vector(scale: Any, *index: Any) -> Any:
    """Block scales uint8 at `index` as 16 float32 lanes: 2^(s-127), also the subnormal 2^-127."""
    exponent = v.cast(v.load(scale, *index), "uint32") << v.splat(23, dtype="uint32")
    return v.bits(T.max(exponent, v.splat(0x00400000, dtype="uint32")), "float32")


def elements(profile: CpuProfile, word: Any) -> list[Any]:
    """The eight unscaled float32 vectors (16 rows each) of 16 words, for k = 0..7 of the word."""
    decode = _avx512 if profile.isa == "avx512" else _arithmetic
    return [decode(word, shift_of(e)) for e in range(8)]


def _avx512(word: Any, shift: int) -> Any:
    """vpermps looks only at the low four bits of each index lane: no mask is needed."""
    index = word >> v.splat(shift, dtype="uint32") if shift else word
    table = T.Shuffle([T.float32(x) for x in E2M1], list(range(16)))
    index = v.bits(index, "int32")
    return v.intrinsic("llvm.x86.avx512.permvar.sf.512", "float32", 16, table, index)


def _arithmetic(word: Any, shift: int) -> Any:
    """Exponent and mantissa bits moved into place; the codes 0 and 1 (0 and 0.5) by conversion."""

    def u(value: int) -> Any:
        return v.splat(value, dtype="uint32")

    code = v.let(word >> u(shift) if shift else word)
    magnitude = v.let(T.bitwise_and(code, u(7)))
    normal = (magnitude << u(22)) + u(0x3F000000)
    # magnitude is 0 or 1 here: 1 -> bits of 0.5, 0 -> 0, without a conversion instruction
    small = magnitude * u(0x3F000000)
    sign = T.bitwise_and(code << u(28), u(0x80000000))
    chosen = T.Select(magnitude < u(2), small, normal)
    return v.bits(T.bitwise_or(chosen, sign), "float32")
