"""Turns exp, sigmoid, SiLU, tanh and softplus of a float32 into plain arithmetic of a GPU thread.

The method and the polynomials are those of the CPU (`k3tvm.schedules.functions`); there is no call
of a device function, whose accuracy differs by vendor and setting. Every step holds with and
without fused multiply-add. NaN is recognised by its bits and put back at the end, since compilers
for GPUs may treat comparisons as if there were none. Subnormal results may be flushed to zero.
"""

from __future__ import annotations

import math
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.functions import (
    ATANH_TAIL,
    EXP_TAIL,
    LN2_HIGH,
    LN2_LOW,
    MAGIC,
    MAGIC_BITS,
)
from k3tvm.schedules.gpu import grid as g

Expr = Any


def polynomial(coefficients: tuple[float, ...], x: Expr) -> Expr:
    """sum(coefficients[k] * x^k), by Horner's rule; x is evaluated once per coefficient."""
    value = g.floats(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = value * x + g.floats(c)
    return g.let(value)


def magnitude_bits(x: Expr) -> Expr:
    """The bits of |x| as int32: they have the order of |x|, with NaN above infinity."""
    return T.bitwise_and(g.bits(x, "int32"), T.int32(0x7FFFFFFF))


def absolute(x: Expr) -> Expr:
    """|x|."""
    return g.let(g.bits(magnitude_bits(x), "float32"))


def unless_nan(x: Expr, value: Expr) -> Expr:
    """`value`, or x where x is NaN."""
    return g.let(T.Select(magnitude_bits(x) > T.int32(0x7F800000), x, value))


def at_most(x: Expr, limit: float) -> Expr:
    """The smaller of x and `limit`."""
    return g.let(T.Select(g.floats(limit) < x, g.floats(limit), x))


def at_least(x: Expr, limit: float) -> Expr:
    """The larger of x and `limit`."""
    return g.let(T.Select(x < g.floats(limit), g.floats(limit), x))


def power_of_two(n: Expr) -> Expr:
    """2^n as float32, for int32 n in [-126, 127]."""
    return g.bits((n + T.int32(127)) << T.int32(23), "float32")


def _reduced(x: Expr) -> tuple[Expr, Expr]:
    """(n, exp(r) - 1) with x = n * ln 2 + r, |r| <= ln(2)/2; n is int32."""
    shifted = g.let(x * g.floats(1.0 / math.log(2.0)) + g.floats(MAGIC))
    n = g.let(g.bits(shifted, "int32") - T.int32(MAGIC_BITS))
    # Not `shifted - MAGIC`: a compiler that takes floats for reals leaves only x * c of it.
    whole = g.let(g.cast(n, "float32"))
    high = g.let(whole * g.floats(-LN2_HIGH) + x)
    low = g.let(whole * g.floats(-LN2_LOW))
    r = g.let(high + low)
    tail = polynomial(EXP_TAIL, r)
    return n, g.let(g.let(r * r * tail + low) + high)


def _exp(x: Expr) -> Expr:
    """e^x for x that is not NaN."""
    n, minus_one = _reduced(at_least(at_most(x, 89.0), -104.0))
    # n reaches -150 and 128, beyond the exponents of one float32: scale in two steps.
    half = g.let(n >> T.int32(1))
    scale = g.let(power_of_two(half))
    # Not (minus_one + 1) * scale: compilers move a constant into the sum that minus_one ends with.
    value = g.let(scale * minus_one + scale)
    return g.let(value * power_of_two(n - half))


def exp(x: Expr) -> Expr:
    """e^x; 0 below -104 (subnormals below -87.3 may be 0), infinity above 88.723."""
    x = g.let(x)
    return unless_nan(x, _exp(x))


def _sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x) for x that is not NaN.

    With e = e^-|x| and t = e / (1 + e) it is 1 - t, and e - e*t for negative x: the corrections
    are small where the result is, so the error of the quotient hardly counts.
    """
    e = _exp(-absolute(x))
    t = g.let(e / (e + g.floats(1.0)))
    base = g.let(T.Select(x < g.floats(0.0), e, g.floats(1.0)))
    return g.let(base - base * t)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x), 0 below -104."""
    x = g.let(x)
    return unless_nan(x, _sigmoid(x))


def silu(x: Expr) -> Expr:
    """x * sigmoid(x); NaN at minus infinity, as the product says."""
    x = g.let(x)
    return g.let(x * sigmoid(x))


def tanh(x: Expr) -> Expr:
    """Hyperbolic tangent, also relatively exact near zero, where it keeps the sign of zero.

    With e = exp(2|x|) - 1 it is e / (e + 2); above |x| = 10 the result is 1 in float32.
    """
    x = g.let(x)
    magnitude = at_most(absolute(x), 10.0)
    n, minus_one = _reduced(g.let(magnitude + magnitude))
    scale = g.let(power_of_two(n))
    e = g.let(scale * minus_one + (scale - g.floats(1.0)))
    quotient = g.let(e / (e + g.floats(2.0)))
    sign = T.bitwise_and(g.bits(x, "int32"), T.int32(-0x80000000))
    return unless_nan(x, g.bits(T.bitwise_or(g.bits(quotient, "int32"), sign), "float32"))


def softplus(x: Expr) -> Expr:
    """log(1 + e^x) = max(x, 0) + log1p(y) with y = e^-|x|, relatively exact on both sides.

    log1p(y) = 2 * atanh(s) = y - s*y + 2*s^3*(1/3 + s^2/5 + ...) with s = y / (2 + y) <= 1/3;
    the first term is exact, so the error of the quotient hardly counts.
    """
    x = g.let(x)
    y = _exp(-absolute(x))
    s = g.let(y / (y + g.floats(2.0)))
    square = g.let(s * s)
    correction = g.let(square * g.floats(-2.0) * polynomial(ATANH_TAIL, square) + y)
    return unless_nan(x, at_least(x, 0.0) + g.let(y - s * correction))
