"""Rows of x become 8-bit digits in device memory, for integer products with MXFP4 codes.

Every 32 values of k, which share a scale of the weight, are fixed-point numbers of 31 bits in a
step of their own, a power of two; four signed bytes hold them. Sums of products with the codes are
then exact. A value is off by less than 2^-29 of the largest of its 32; of those at least 2^-5 of it
nothing is lost. NaN and infinity make all 32 NaN.

A prepared row is [group of 32 k][4 digits, the lowest first][4 lanes][2 words], then [group] what
the highest digit is worth, times 1/2, since codes count halves. Lane t of a warp multiplies the
codes of word t of the group, in the order of their bits: 0 4 1 5 and 2 6 3 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import GROUP

Expr = Any
Read = Callable[[Expr, Expr, Expr, int], Expr]  # (row, choice, first k, lanes) -> values of x

DIGITS = 4
LANES = 4  # of a warp that share a group
RUN = GROUP // LANES  # elements of k of a lane
RUN_WORDS = RUN // 4
GROUP_WORDS = DIGITS * LANES * RUN_WORDS
BATCH = 4  # groups that are read at a time; rows are filled up to a multiple
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the codes in a word of weights
BITS = 30  # values are below 2^BITS in the step of their group
LEAST = 29  # of the float32 exponents that set a step: the step's reciprocal stays finite
THREADS = 128


@dataclass(frozen=True)
class Digits:
    """The form of a row of k values, k a multiple of 32."""

    k: int

    @property
    def groups(self) -> int:
        """Groups that hold values."""
        return self.k // GROUP

    @property
    def padded(self) -> int:
        """Groups that there are, the last ones zero."""
        return -(-self.groups // BATCH) * BATCH

    @property
    def words(self) -> int:
        """32-bit words of a row."""
        return self.padded * (GROUP_WORDS + 1)

    @property
    def worth(self) -> int:
        """The word of the row where the worth of its groups begins."""
        return self.padded * GROUP_WORDS


def digits_of(form: Digits, rows: Expr, choices: int, read: Read) -> Any:
    """Emit the launch that prepares `rows` x `choices` rows; returns them [rows, choices, words].

    read(row, choice, k, lanes): `lanes` values of x from element k on.
    """
    out = g.workspace((rows, choices, form.words), "uint32")
    with g.each(rows * T.int32(choices * form.padded * LANES), THREADS) as item:
        at, t = g.let(item // T.int32(LANES)), g.let(item % T.int32(LANES))
        line, group = g.let(at // T.int32(form.padded)), g.let(at % T.int32(form.padded))
        place = g.let(line // T.int32(choices)), g.let(line % T.int32(choices))
        words = [g.variable(0, "uint32") for _ in range(DIGITS * RUN_WORDS)]
        worth = g.variable(0, "uint32")
        with g.when(group < T.int32(form.groups)):
            start = group * T.int32(GROUP)
            run = start + t * T.int32(RUN)
            top = _exponent([read(*place, start + T.int32(k), 4) for k in range(0, GROUP, 4)])
            values = [g.let(read(*place, run + T.int32(k), 4)) for k in range(0, RUN, 4)]
            _digits(top, [g.lane(v, i) for v in values for i in range(4)], words)
            bad = T.uint32(0x7FC00000)
            g.put(worth, T.Select(top < T.int32(255), _power(top - T.int32(6)), bad))
        for digit in range(DIGITS):
            pair = [words[digit * RUN_WORDS + i][0] for i in range(RUN_WORDS)]
            to = group * T.int32(GROUP_WORDS) + T.int32(digit * LANES * RUN_WORDS)
            both = T.Shuffle(pair, list(range(RUN_WORDS)))
            g.store(out, both, *place, to + t * T.int32(RUN_WORDS), lanes=RUN_WORDS)
        with g.when(t == T.int32(0)):
            g.store(out, worth[0], *place, T.int32(form.worth) + group)
    return out


def _exponent(fours: list[Expr]) -> Expr:
    """The biased exponent of the largest of a group, 255 if one is not finite, at least LEAST."""
    most = g.variable(0, "int32")
    for four in fours:
        values = g.let(four)
        for i in range(4):
            bits = T.bitwise_and(g.bits(g.lane(values, i), "uint32"), T.uint32(0x7FFFFFFF))
            g.put(most, T.max(most[0], g.cast(bits, "int32")))
    return g.let(T.max(most[0] >> T.int32(23), T.int32(LEAST)))


def _power(exponent: Expr) -> Expr:
    """The bits of the float32 power of two with this biased exponent."""
    return g.cast(exponent << T.int32(23), "uint32")


def _digits(top: Expr, values: list[Expr], words: list[Any]) -> None:
    """Words of the digits of 8 values whose largest has the biased exponent `top`."""
    # a value is below 2^(top - 126)
    factor = g.let(g.bits(_power(T.int32(127 + 126 + BITS) - top), "float32"))
    carry = T.uint32(0x80808080)  # bytes become signed: each lends 128 to the next
    fixed = [
        g.let(T.bitwise_xor(g.cast(g.cast(value * factor, "int32"), "uint32") + carry, carry))
        for value in values
    ]
    for digit in range(DIGITS):
        bytes_ = [
            T.bitwise_and(fixed[i] >> T.uint32(8 * digit) if digit else fixed[i], T.uint32(255))
            for i in ORDER
        ]
        for half in range(RUN_WORDS):
            word = bytes_[4 * half]
            for i in range(1, 4):
                word = T.bitwise_or(word, bytes_[4 * half + i] << T.uint32(8 * i))
            g.put(words[digit * RUN_WORDS + half], word)
