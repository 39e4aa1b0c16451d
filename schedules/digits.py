"""Activations as 24-bit fixed point in three signed digits, and MXFP4 dot products in integers.

MXFP4 times float32 needs one table look-up and one multiply-add per weight. Integers need less: a
byte shuffle looks up 64 weights at once as u = 2*w + 12, an integer in 0..24, and an instruction
multiplies and adds four (or two) bytes a lane. Per 32 values of x, which share a weight scale too,

    x ~= step * (d0 + 256*d1 + 65536*d2),   digits in [-128, 127], step a power of two

with |error| <= step/2 <= 2^-23 * max|x|; the sum over the 32 is then exact, and is scaled once:

    sum_k w*x = 2^(s-127) * step/2 * sum_j 256^j * (sum_k u*d_j - 12 * sum_k d_j)

Activations are not rounded to 8 bits here: the result is as good as float32 products (the sum of
products differs from the exact one by at most 3e-7 of sum |w*x|; tests/test_linear.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules import vector as v
from k3tvm.schedules.mxfp4_cpu import scale_vector
from k3tvm.schedules.profile import CpuProfile

GROUP = 32  # values that share a step: the MXFP4 group
DIGITS = 3
LARGEST = 127 * 65536  # of the fixed-point numbers, so that the top digit fits a byte
OFFSET = 12  # u = 2*w + OFFSET
AHEAD = 192  # words of 64 bytes that are asked for early: 12 KiB
CODES = tuple(OFFSET + c for c in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


@dataclass(frozen=True)
class Digits:
    """Rows of x in digits.

    bytes int8 [rows, k/32, 3, 32]; start int32 [rows, k/32, 3], what the integer sums begin with:
    -12 * (sum of the digits), for AVX2 as two int16 halves; half_step float32 [rows, k/32].
    """

    bytes: Any
    start: Any
    half_step: Any


def uses_digits(profile: CpuProfile) -> bool:
    """Whether the target has the byte multiply-add that this needs."""
    return profile.isa in ("avx2", "avx512")


def allocate(rows: Any, k: int) -> Digits:
    """Workspace for `rows` rows of `k` values."""
    blocks = k // GROUP
    return Digits(
        v.workspace([rows, blocks, DIGITS, GROUP], "int8"),
        v.workspace([rows, blocks, DIGITS], "int32"),
        v.workspace([rows, blocks], "float32"),
    )


def quantise(
    profile: CpuProfile, out: Digits, row: Any, k: int, load: Callable[[Any], Any]
) -> None:
    """Write row `row` of the digits; `load(at)` gives 16 values of x from `at` on."""
    with v.serial(k // GROUP) as block:
        halves = [v.let(load(block * GROUP + h * v.LANES)) for h in (0, 1)]
        step, half_step = _step(halves)
        v.store(out.half_step, half_step, row, block, lanes=1)
        inverse = v.splat(v.let(T.float32(1.0) / step))
        numbers = [
            v.let(v.cast(v.float_intrinsic("nearbyint", v.LANES, x * inverse), "int32"))
            for x in halves
        ]
        for digit in range(DIGITS):
            lows = [_low(n) for n in numbers]
            for h, low in enumerate(lows):
                v.store(out.bytes, v.cast(low, "int8"), row, block, digit, h * v.LANES)
            v.store(out.start, _start(profile, lows), row, block, digit, lanes=1)
            numbers = [
                v.let((n - low) >> v.splat(8, dtype="int32"))
                for n, low in zip(numbers, lows, strict=True)
            ]


def _step(halves: list[Any]) -> tuple[Any, Any]:
    """The least power of two with max|x| <= LARGEST * step (a tiny one for zeros), and its half.

    The half is NaN when x holds NaN or infinity, which integers would turn into numbers. Sizes are
    compared as integers: the bits of NaN and infinity are larger than those of any number.
    """
    sign_off = v.splat(0x7FFFFFFF, dtype="int32")
    sizes = [T.bitwise_and(v.bits(x, "int32"), sign_off) for x in halves]
    bits = v.reduce_int("smax", v.let(T.max(*sizes)))
    largest = T.max(v.bits(bits, "float32", 1), T.float32(1e-30))
    scaled = v.bits(largest * T.float32(1.0 / LARGEST), "uint32", 1)
    up = T.bitwise_and(scaled + T.uint32(0x7FFFFF), T.uint32(0xFF800000))
    step = v.let(v.bits(up, "float32", 1))
    nan = v.bits(T.uint32(0x7FC00000), "float32", 1)
    return step, T.Select(bits < T.int32(0x7F800000), step * T.float32(0.5), nan)


def _low(number: Any) -> Any:
    """The signed low digit of int32 lanes: the value in [-128, 127] congruent modulo 256."""
    n = number + v.splat(128, dtype="int32")
    return v.let(T.bitwise_and(n, v.splat(255, dtype="int32")) - v.splat(128, dtype="int32"))


def _start(profile: CpuProfile, lows: list[Any]) -> Any:
    """-12 times the sum of a digit over the group, as the integer sums begin with it."""
    both = v.let(lows[0] + lows[1])
    if profile.isa == "avx512":
        return v.reduce_add(both) * T.int32(-OFFSET)
    # AVX2 sums the byte pairs (0, 1) and (2, 3) of every four apart, in 16 bits each
    four = v.fold_add(both, v.LANES, 4)
    pairs = [v.reduce_add(v.let(T.Shuffle([four], [i, i + 1])), 2) for i in (0, 2)]
    first, second = (v.let(p * T.int32(-OFFSET)) for p in pairs)
    return T.bitwise_or(T.bitwise_and(first, T.int32(0xFFFF)), second << T.int32(16))


def matvec(
    profile: CpuProfile,
    words: Any,
    scale: Any,
    lead: tuple[Any, ...],
    x: Digits,
    row: Any,
    k: int,
) -> Any:
    """One packed MXFP4 block (16 rows) times row `row` of the digits: 16 float32 sums.

    Weights are asked for early beyond the end of the block: a thread mostly reads on from there,
    or comes back to it while it is still in L2 (stopping at the end was measured to be slower).
    """
    total = v.scratch(v.LANES)
    v.store(total, v.splat(0.0), 0)
    sums = _sums_avx512 if profile.isa == "avx512" else _sums_avx2
    with v.serial(k // GROUP) as block:
        loaded = [v.let(v.load(words, *lead, block * 4 + i, 0)) for i in range(4)]
        for i in range(4):
            v.prefetch(words, *lead, block * 4 + (AHEAD + i), 0)
        low, middle, high = sums(loaded, x, row, block)
        value = v.cast(low + (middle << v.splat(8, dtype="int32")), "float32")
        value = v.fma(profile, v.cast(high, "float32"), v.splat(65536.0), value)
        # the step first: times the weight scale it could underflow
        value = value * v.splat(v.load(x.half_step, row, block, lanes=1))
        factor = scale_vector(scale, *lead, block, 0)
        v.store(total, v.fma(profile, value, factor, v.load(total, 0)), 0)
    return v.let(v.load(total, 0))


def _four(x: Digits, row: Any, block: Any, digit: int, group: int) -> Any:
    """Four consecutive digits as one int32."""
    return v.bits(v.load(x.bytes, row, block, digit, group * 4, lanes=4), "int32", 1)


def _table(lanes: int) -> Any:
    codes = [CODES[i % 16] for i in range(lanes)]
    return T.Shuffle([T.int8(c) for c in codes], list(range(lanes)))


def _sums_avx512(words: list[Any], x: Digits, row: Any, block: Any) -> list[Any]:
    """Per digit the int32 sums of 16 rows: vpdpbusd adds four byte products to each lane.

    vpermb takes six bits of each index byte; with the table four times in its 64 entries the upper
    nibble does not matter, and no mask is needed.
    """
    sums = [v.let(v.splat(v.load(x.start, row, block, d, lanes=1))) for d in range(DIGITS)]
    for i, word in enumerate(words):
        for h in (0, 1):
            index = v.bits(word >> v.splat(4, dtype="uint32") if h else word, "int8", 64)
            name = "llvm.x86.avx512.permvar.qi.512"
            codes = v.let(v.intrinsic(name, "int8", 64, _table(64), index))
            for d in range(DIGITS):
                four = v.bits(v.splat(_four(x, row, block, d, 2 * i + h)), "int8", 64)
                name = "llvm.x86.avx512.vpdpbusd.512"
                sums[d] = v.let(v.intrinsic(name, "int32", 16, sums[d], codes, four))
    return sums


def _codes_avx2(word: Any, high: bool) -> Any:
    """u of four consecutive k for each of eight rows; vpshufb wants the upper nibble cleared."""
    nibbles = word >> v.splat(4, 8, "uint32") if high else word
    masked = v.bits(T.bitwise_and(nibbles, v.splat(0x0F0F0F0F, 8, "uint32")), "int8", 32)
    return v.let(v.intrinsic("llvm.x86.avx2.pshuf.b", "int8", 32, _table(32), masked))


def _sums_avx2(words: list[Any], x: Digits, row: Any, block: Any) -> list[Any]:
    """The same with AVX2, eight rows at a time.

    vpmaddubsw makes int16 sums of two products. They may wrap around while they are added, but
    started at -12 * (sum of digits) they end at 2*w*d summed over 16, at most 24576 in size.
    """
    halves = []
    for part in (0, 8):
        start = [v.splat(v.load(x.start, row, block, d, lanes=1), 8) for d in range(DIGITS)]
        sums = [v.let(v.bits(s, "int16", 16)) for s in start]
        for i, word in enumerate(words):
            eight = v.let(T.Shuffle([word], list(range(part, part + 8))))
            for h in (0, 1):
                codes = _codes_avx2(eight, h == 1)
                for d in range(DIGITS):
                    four = v.bits(v.splat(_four(x, row, block, d, 2 * i + h), 8), "int8", 32)
                    pairs = v.intrinsic("llvm.x86.avx2.pmadd.ub.sw", "int16", 16, codes, four)
                    sums[d] = v.let(sums[d] + pairs)
        ones = v.splat(1, 16, "int16")
        halves.append(
            [v.let(v.intrinsic("llvm.x86.avx2.pmadd.wd", "int32", 8, s, ones)) for s in sums]
        )
    return [v.let(v.concat(a, b, 8)) for a, b in zip(*halves, strict=True)]
