"""Integers of a kernel as arrays over its workgroups, threads and loops: one axis for each.

A value has as many axes as were open where it was computed, and length 1 along those on which it
does not depend, so that `workgroup * 256 + thread` is a matrix and `thread % 32` a vector. What
the kernel reads from tensors of numbers is not followed: it is `Data`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LIMIT = 1 << 21  # elements of one array; what would be larger is not followed


@dataclass(frozen=True)
class Data:
    """A value that is not followed: how many lanes it has, and whether it is a float.

    least, most: between what it is, if an integer of which there are too many to follow.
    """

    lanes: int = 1
    real: bool = False
    least: int | None = None
    most: int | None = None

    @property
    def index(self) -> bool:
        """Whether it comes from indices, and not from what tensors hold."""
        return self.least is not None


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
        return _between(function, values)
    arrays = align(values)
    if math.prod(joint_shape(arrays)) > LIMIT:
        return _between(function, values)
    return function(*arrays)


def _between(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """What can be said of a result whose operands each lie between two numbers.

    All our index arithmetic is monotonic in each operand, or chooses one, or is a remainder.
    """
    if function is np.where:
        return _hull(values[1:])
    ends = [bounds(v) for v in values]
    if len(values) != 2 or ends[0] is None or ends[1] is None:
        return UNKNOWN
    (a, b), (c, d) = ends[0], ends[1]
    if function in (remainder, floor_remainder) and a >= 0 and c > 0:
        return Data(least=0, most=min(b, d - 1))
    if function not in MONOTONIC:
        return UNKNOWN
    corners = [int(function(x, y)) for x in (a, b) for y in (c, d)]
    if function in COMPARISONS:
        return corners[0] if len(set(corners)) == 1 else UNKNOWN
    return Data(least=min(corners), most=max(corners))


def _hull(values: Sequence[Any]) -> Data:
    """One of several values."""
    ends = [bounds(v) for v in values]
    known = [e for e in ends if e is not None]
    if len(known) < len(ends):
        return UNKNOWN
    return Data(least=min(low for low, _ in known), most=max(high for _, high in known))


def bounds(value: Any) -> tuple[int, int] | None:
    """The least and the most that an integer is, if that is known."""
    if is_known(value):
        return int(np.min(value)), int(np.max(value))
    if isinstance(value, Data) and value.least is not None and value.most is not None:
        return value.least, value.most
    return None


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


COMPARISONS: tuple[Callable[..., Any], ...] = (
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
)
MONOTONIC: tuple[Callable[..., Any], ...] = (
    operator.add,
    operator.sub,
    operator.mul,
    divided,
    floor_divided,
    np.minimum,
    np.maximum,
    *COMPARISONS,
)
