"""Turns exp, sigmoid, SiLU, tanh and softplus of float32 vectors into plain vector arithmetic.

There are no library calls. All functions work on any number of lanes that LLVM knows, on every
target, over the whole float32 range: NaN stays NaN, too large gives infinity, too small gives zero,
through the subnormals where the processor keeps them. Largest errors measured over dense grids
against float64, in units of the last place of the result: exp 0.94, sigmoid 1.7, tanh 2.3,
softplus 2.1, SiLU 2.4 (above -87, further out its factor sigmoid is subnormal).

Polynomials are interpolated here at Chebyshev points, which is within a small factor of the best
polynomial of that degree, from the power series of the function they replace. Their own errors
(2e-8 relative at most) are well under the roundings of their evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import CpuProfile

Expr = Any

# Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits. Unlike the round
# and convert instructions it needs nothing beyond the x86-64 baseline and is defined for NaN.
MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
# ln 2 in two parts: n * LN2_HIGH is exact in float32 for |n| < 2^14, with and without fma.
LN2_HIGH = 355.0 / 512.0
LN2_LOW = math.log(2.0) - LN2_HIGH


def interpolated(
    series: Callable[[int], float], degree: int, low: float, high: float
) -> tuple[float, ...]:
    """Coefficients, constant first, of the polynomial through sum(series(k) * x^k) on [low, high].

    The polynomial meets the function at `degree` + 1 Chebyshev points of the interval.
    """
    whole = np.polynomial.Polynomial([series(k) for k in range(30)])
    fit = np.polynomial.Chebyshev.interpolate(whole, degree, domain=[low, high])
    return tuple(float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef)


# (exp(r) - 1 - r) / r^2; |r| <= ln(2)/2 and a little more, as rounding to n is not exact
EXP_TAIL = interpolated(lambda k: 1.0 / math.factorial(k + 2), 4, -0.3469, 0.3469)
# (atanh(s) - s) / s^3 as a function of s^2, 0 <= s <= 1/3
ATANH_TAIL = interpolated(lambda k: 1.0 / (2 * k + 3), 3, 0.0, 1.0 / 9.0)


def polynomial(
    p: CpuProfile, coefficients: tuple[float, ...], x: Expr, lanes: int = v.LANES
) -> Expr:
    """sum(coefficients[k] * x^k), by Horner's rule."""
    value = v.splat(coefficients[-1], lanes)
    for c in reversed(coefficients[:-1]):
        value = v.fma(p, value, x, v.splat(c, lanes), lanes)
    return v.let(value)


def at_most(x: Expr, limit: float, lanes: int = v.LANES) -> Expr:
    """min(x, limit), NaN kept (llvm.minnum would drop it)."""
    bound = v.splat(limit, lanes)
    return v.let(T.Select(bound < x, bound, x))


def at_least(x: Expr, limit: float, lanes: int = v.LANES) -> Expr:
    """max(x, limit), NaN kept."""
    bound = v.splat(limit, lanes)
    return v.let(T.Select(x < bound, bound, x))


def power_of_two(n: Expr, lanes: int = v.LANES) -> Expr:
    """2^n as float32, for int32 n in [-126, 127]."""
    biased = (n + v.splat(127, lanes, "int32")) << v.splat(23, lanes, "int32")
    return v.bits(biased, "float32", lanes)


def _reduced(p: CpuProfile, x: Expr, lanes: int) -> tuple[Expr, Expr]:
    """(n, exp(r) - 1) with x = n * ln 2 + r, |r| <= ln(2)/2; n is int32."""
    shifted = v.fma(p, x, v.splat(1.0 / math.log(2.0), lanes), v.splat(MAGIC, lanes), lanes)
    n = v.let(v.bits(shifted, "int32", lanes) - v.splat(MAGIC_BITS, lanes, "int32"))
    # Not `shifted - MAGIC`: where that is simplified as if floats were reals, only x * c is left.
    whole = v.let(v.cast(n, "float32", lanes))
    high = v.let(v.fma(p, whole, v.splat(-LN2_HIGH, lanes), x, lanes))
    low = v.let(whole * v.splat(-LN2_LOW, lanes))
    r = v.let(high + low)
    tail = polynomial(p, EXP_TAIL, r, lanes)
    # `high` is exact: adding it last leaves one rounding of the size of the result.
    return n, v.let(v.fma(p, v.let(r * r), tail, low, lanes) + high)


def exp(p: CpuProfile, x: Expr, lanes: int = v.LANES) -> Expr:
    """e^x; 0 below -104 (through subnormals below -87.3), infinity above 88.723."""
    x = at_least(at_most(v.let(x), 89.0, lanes), -104.0, lanes)
    n, minus_one = _reduced(p, x, lanes)
    # n reaches -150 and 128, beyond the exponents of one float32: scale in two steps.
    half = v.let(n >> v.splat(1, lanes, "int32"))
    value = (minus_one + v.splat(1.0, lanes)) * power_of_two(half, lanes)
    return v.let(value * power_of_two(n - half, lanes))


def sigmoid(p: CpuProfile, x: Expr, lanes: int = v.LANES) -> Expr:
    """1 / (1 + e^-x), through the subnormals to 0 below -104.

    With e = e^-|x| and t = e / (1 + e) it is 1 - t, and e - e*t for negative x: the corrections
    are small where the result is, so the error of the quotient hardly counts.
    """
    x = v.let(x)
    one = v.splat(1.0, lanes)
    e = exp(p, -absolute(x, lanes), lanes)
    t = v.let(e / (one + e))
    base = v.let(T.Select(x < v.splat(0.0, lanes), e, one))
    return v.let(v.fma(p, -base, t, base, lanes))


def silu(p: CpuProfile, x: Expr, lanes: int = v.LANES) -> Expr:
    """x * sigmoid(x); NaN at minus infinity, as the product says."""
    x = v.let(x)
    return v.let(x * sigmoid(p, x, lanes))


def tanh(p: CpuProfile, x: Expr, lanes: int = v.LANES) -> Expr:
    """Hyperbolic tangent, also relatively exact near zero, where it keeps the sign of zero.

    With e = exp(2|x|) - 1 it is e / (e + 2); above |x| = 10 the result is 1 in float32.
    """
    x = v.let(x)
    magnitude = at_most(absolute(x, lanes), 10.0, lanes)
    n, minus_one = _reduced(p, v.let(magnitude + magnitude), lanes)
    scale = v.let(power_of_two(n, lanes))
    e = v.let(v.fma(p, scale, minus_one, scale - v.splat(1.0, lanes), lanes))
    return with_sign(v.let(e / (e + v.splat(2.0, lanes))), x, lanes)


def softplus(p: CpuProfile, x: Expr, lanes: int = v.LANES) -> Expr:
    """log(1 + e^x) = max(x, 0) + log1p(y) with y = e^-|x|, relatively exact on both sides.

    log1p(y) = 2 * atanh(s) = y - s*y + 2*s^3*(1/3 + s^2/5 + ...) with s = y / (2 + y) <= 1/3;
    the first term is exact, so the error of the quotient hardly counts.
    """
    x = v.let(x)
    y = exp(p, -absolute(x, lanes), lanes)
    s = v.let(y / (y + v.splat(2.0, lanes)))
    square = v.let(s * s)
    series = polynomial(p, ATANH_TAIL, square, lanes)
    correction = v.let(v.fma(p, v.let(square * v.splat(-2.0, lanes)), series, y, lanes))
    log1p = v.fma(p, -s, correction, y, lanes)
    return v.let(at_least(x, 0.0, lanes) + log1p)


def absolute(x: Expr, lanes: int = v.LANES) -> Expr:
    """|x|."""
    mask = v.splat(0x7FFFFFFF, lanes, "uint32")
    return v.let(v.bits(T.bitwise_and(v.bits(x, "uint32", lanes), mask), "float32", lanes))


def with_sign(magnitude: Expr, x: Expr, lanes: int = v.LANES) -> Expr:
    """`magnitude` (not negative) with the sign of x."""
    sign = T.bitwise_and(v.bits(x, "uint32", lanes), v.splat(0x80000000, lanes, "uint32"))
    return v.let(v.bits(T.bitwise_or(v.bits(magnitude, "uint32", lanes), sign), "float32", lanes))
