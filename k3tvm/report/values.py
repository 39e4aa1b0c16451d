"""Integers of a kernel as arrays over its workgroups, threads and loops: one axis for each.

A value has as many axes as were open where it was computed, and length 1 along those on which it
does not depend, so that `workgroup * 256 + thread` is a matrix and `thread % 32` a vector. What
the kernel reads from tensors of numbers is not followed: it is `Data`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LIMIT = 1 << 21  # elements of one array; what would be larger is not followed


@dataclass(frozen=True)
class Data:
    """A value that is not followed: how many lanes it has, and whether it is a float."""

    lanes: int = 1
    real: bool = False


@dataclass(frozen=True)
class Ramp:
    """Consecutive integers: the index of a vector."""

    start: Any
    lanes: int


Known = int | np.ndarray
Value = int | np.ndarray | Data | Ramp
UNKNOWN = Data()


def is_known(value: Any) -> bool:
    """Whether it is an integer, or one for every thread."""
    return isinstance(value, int | np.ndarray | np.integer | np.bool_)


def lanes_of(value: Any) -> int:
    """Lanes of a vector."""
    return value.lanes if isinstance(value, Data | Ramp) else 1


def aligned(value: Any, axes: int) -> np.ndarray:
    """The value with so many axes; those that came after it do not change it."""
    array = np.asarray(value)
    return array.reshape(array.shape + (1,) * (axes - array.ndim))


def align(values: Sequence[Any]) -> list[np.ndarray]:
    """All of them with the same number of axes."""
    axes = max((np.ndim(v) for v in values), default=0)
    return [aligned(v, axes) for v in values]


def reduced(value: Any) -> Any:
    """The value without the axes along which it is the same everywhere."""
    if np.ndim(value) == 0:
        return value
    for axis in range(value.ndim):
        if value.shape[axis] > 1:
            first = value.take([0], axis=axis)
            if (value == first).all():
                value = first
    return int(value.flat[0]) if value.size == 1 and value.dtype != bool else value


def joint_shape(arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The shape of what depends on all of them; they have equally many axes."""
    return tuple(max(lengths) for lengths in zip(*(a.shape for a in arrays), strict=True))


def combine(function: Callable[..., Any], *values: Any) -> Any:
    """function(*values) element by element, or UNKNOWN if one is not known or all too many."""
    if all(isinstance(v, int) for v in values):
        return function(*values)
    if not all(is_known(v) for v in values):
        return UNKNOWN
    arrays = align(values)
    if math.prod(joint_shape(arrays)) > LIMIT:
        return UNKNOWN
    return function(*arrays)


def is_always(value: Any, wanted: bool) -> bool:
    """Whether a condition is known and the same everywhere."""
    if not is_known(value):
        return False
    return bool(np.all(value) if wanted else not np.any(value))


def divided(a: Any, b: Any) -> Any:
    """The quotient cut off, as C has it; dividing by zero gives zero (nobody uses it)."""
    quotient = np.floor_divide(np.abs(a), np.maximum(np.abs(b), 1))
    return quotient * np.sign(a) * np.sign(b)


def remainder(a: Any, b: Any) -> Any:
    """What `divided` leaves over."""
    return a - divided(a, b) * b


def floor_divided(a: Any, b: Any) -> Any:
    """The quotient rounded down."""
    return np.floor_divide(a, np.where(np.asarray(b) == 0, 1, b))


def floor_remainder(a: Any, b: Any) -> Any:
    """What `floor_divided` leaves over."""
    return a - floor_divided(a, b) * b
