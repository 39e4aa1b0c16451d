"""Turns functions into short polynomials and those into GLSL text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def fitted(
    function: Callable[[float], float], degree: int, low: float, high: float
) -> tuple[float, ...]:
    """Coefficients, constant first, of the polynomial that meets `function` at Chebyshev points."""
    fit = np.polynomial.Chebyshev.interpolate(
        np.vectorize(function), degree, domain=[low, high]
    ).convert(kind=np.polynomial.Polynomial)
    return tuple(float(c) for c in fit.coef)


def horner(coefficients: Sequence[float], variable: str) -> str:
    """The GLSL text of a polynomial of a float variable."""
    text = f"{coefficients[-1]:.9g}"
    for c in reversed(coefficients[:-1]):
        text = f"fma({text}, {variable}, {c:.9g})"
    return text
