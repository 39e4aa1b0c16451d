"""Loads and stores of a launch become bytes: all of them, once per workgroup, and once at all."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from k3tvm.report.domain import Domain, Product, TooManyError, places, united, widened
from k3tvm.report.state import Access, Tensor
from k3tvm.report.values import combine, floor_divided, is_known

SAMPLE, FEW = 4, 16  # workgroups that are taken, and so many of which all are


@dataclass(frozen=True)
class Bytes:
    """A number of bytes; exact: else an upper bound."""

    count: int
    exact: bool = True


def requested(accesses: Sequence[Access]) -> Bytes:
    """Bytes of all loads or stores."""
    total, exact = 0, True
    for a in accesses:
        count, known = points(a.domain)
        total += count * a.lanes * a.tensor.bytes
        exact &= known
    return Bytes(total, exact)


def points(domain: Domain) -> tuple[int, bool]:
    """How often a place of the kernel is reached, and whether that is exact."""
    try:
        return domain.points, domain.exact
    except TooManyError:
        return math.prod(domain.extents), False


def per_workgroup(accesses: Sequence[Access], grid: Sequence[int]) -> int:
    """Bytes that workgroups access, those of each counted once, by a sample of workgroups.

    The step of the sample is odd: every second workgroup may be of another kind.
    """
    step = 1 if grid[0] <= FEW else -(-grid[0] // SAMPLE) | 1
    sample = [_sampled(a, step) for a in accesses]
    taken = [len(range(0, grid[0], step)), *grid[1:]]
    return touched(sample, taken).count * grid[0] // taken[0]


def _sampled(a: Access, step: int) -> Access:
    """The access in every workgroup number 0, step, ... along x."""

    def cut(value: Any) -> Any:
        return value[::step] if np.ndim(value) else value

    extents = (len(range(0, a.domain.extents[0], step)), *a.domain.extents[1:])
    conditions = tuple(cut(c) for c in a.domain.conditions)
    index = a.index and tuple(cut(i) for i in a.index)
    return replace(a, index=index, domain=Domain(extents, conditions, a.domain.exact))


def touched(accesses: Sequence[Access], grid: Sequence[int] = ()) -> Bytes:
    """Bytes that are accessed at least once, by all workgroups, or with a `grid` by each of them.

    The accesses are to tensors of any kind.
    """
    total, exact = 0, True
    for tensor in {id(a.tensor): a.tensor for a in accesses}.values():
        bytes_ = _touched([a for a in accesses if a.tensor is tensor], tensor, grid)
        total += bytes_.count
        exact &= bytes_.exact
    return Bytes(total, exact)


def _touched(accesses: Sequence[Access], tensor: Tensor, grid: Sequence[int]) -> Bytes:
    reached = [_carried(a) for a in accesses if points(a.domain)[0]]
    most = math.prod(tensor.shape) * math.prod(grid)
    if not most:
        return Bytes(0)
    vague = [a for a in reached if a.index is None]
    clear = [a for a in reached if a.index is not None]
    bound = sum(points(a.domain)[0] * a.lanes for a in vague)
    try:
        count = _united(clear, tensor, grid)
    except TooManyError:
        count, vague = sum(points(a.domain)[0] * a.lanes for a in clear), reached
    exact = not vague and all(a.domain.exact for a in reached)
    return Bytes(min(count + bound, most) * tensor.bytes, exact)


def _carried(a: Access) -> Access:
    """The access with every index inside of its dimension.

    Kernels may reach the next rows through the last dimension.
    """
    if a.index is None:
        return a
    index, over = list(a.index), 0
    for d in range(len(index) - 1, 0, -1):
        whole = combine(operator.add, index[d], over)
        over = combine(floor_divided, whole, a.tensor.shape[d])
        if not is_known(over):
            return replace(a, index=None)
        if np.any(over):
            index[d] = combine(operator.sub, whole, over * a.tensor.shape[d])
        else:
            index[d], over = whole, 0
    index[0] = combine(operator.add, index[0], over)
    return replace(a, index=tuple(index)) if all(is_known(i) for i in index) else a


def _united(accesses: Sequence[Access], tensor: Tensor, grid: Sequence[int]) -> int:
    """Elements of a tensor that are accessed, times the workgroups that do."""
    if not accesses:
        return 0
    unit = _unit(accesses, tensor)
    sizes = [*grid, *tensor.shape[:-1], tensor.shape[-1] // unit]
    sets: dict[bytes, Product] = {}
    for a in accesses:
        product = _places(a, grid, sizes, unit)
        if product is not None:
            key = b"".join(repr(d).encode() + n.tobytes() for d, n in sorted(product.items()))
            sets[key] = product
    return united(list(sets.values()), sizes) * unit


def _places(a: Access, grid: Sequence[int], sizes: Sequence[int], unit: int) -> Product | None:
    blocks = [np.arange(e).reshape((1,) * i + (e,)) for i, e in enumerate(grid)]
    *head, last = a.index or ()
    found = places(a.domain, [*blocks, *head, last // unit], sizes)
    return found and widened(found, len(sizes) - 1, a.lanes // unit, sizes)


def _unit(accesses: Sequence[Access], tensor: Tensor) -> int:
    """Elements that are always accessed together: the largest vector that all accesses allow."""
    unit = math.gcd(tensor.shape[-1], *(a.lanes for a in accesses))
    for a in accesses:
        if unit > 1 and a.index is not None:
            unit = math.gcd(unit, int(np.gcd.reduce(np.ravel(a.index[-1]))))
    return unit
