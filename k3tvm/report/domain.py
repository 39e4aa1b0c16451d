"""Which elements of a tensor are touched: sets of places, counted without listing every access.

Indices and conditions that share no workgroup, thread or loop index are independent: their numbers
multiply. So only what hangs together is enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from k3tvm.report.values import LIMIT, align, aligned, joint_shape, reduced

BITMAP = 1 << 26  # places that are marked in an array of flags; more are sorted


class TooManyError(Exception):
    """An enumeration would be too long."""


def linked(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    """Numbers of the arrays that hang together, through axes along which both vary."""
    groups: list[tuple[set[int], list[int]]] = []
    for number, array in enumerate(arrays):
        axes = {i for i, length in enumerate(array.shape) if length > 1}
        members = [number]
        rest = []
        for group in groups:
            if group[0] & axes:
                axes |= group[0]
                members = group[1] + members
            else:
                rest.append(group)
        groups = [*rest, (axes, members)]
    return [members for _, members in groups]


@dataclass(frozen=True)
class Domain:
    """Where a statement runs: the lengths of all open axes, and conditions (arrays of bool).

    exact: no condition is left out.
    """

    extents: tuple[int, ...]
    conditions: tuple[np.ndarray, ...]
    exact: bool = True

    @cached_property
    def limits(self) -> tuple[np.ndarray, ...]:
        """The conditions, without the axes along which they are the same."""
        return tuple(reduced(c) for c in self.conditions)

    @cached_property
    def points(self) -> int:
        """How often it runs, all threads together."""
        total, seen = 1, set[int]()
        conditions = [aligned(c, len(self.extents)) for c in self.limits]
        for members in linked(conditions):
            arrays = [conditions[i] for i in members]
            shape = joint_shape(arrays)
            total *= int(np.count_nonzero(_all(arrays, shape)))
            seen |= {i for i, length in enumerate(shape) if length > 1}
        return total * math.prod(e for i, e in enumerate(self.extents) if i not in seen)


def _all(conditions: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    if math.prod(shape) > LIMIT:
        raise TooManyError
    mask = np.ones(shape, bool)
    for condition in conditions:
        mask &= condition
    return mask


# A set of places as a product: which dimensions hang together -> their values, as sorted numbers in
# mixed radix. Dimensions that are not named do not exist.
Product = dict[tuple[int, ...], np.ndarray]


def places(
    domain: Domain, indices: Sequence[np.ndarray | int], sizes: Sequence[int]
) -> Product | None:
    """The places that `indices` (one per dimension, of lengths `sizes`) name; None for no place."""
    end = np.zeros((1,) * len(domain.extents), int)
    arrays = align([*(reduced(i) for i in indices), *domain.limits, end])
    count = len(indices)
    product: Product = {}
    for members in linked(arrays[:-1]):
        dims = tuple(sorted(i for i in members if i < count))
        limits = [arrays[i] for i in members if i >= count]
        shape = joint_shape([arrays[i] for i in members])
        mask = _all(limits, shape) if limits else None
        if mask is not None and not mask.any():
            return None
        if dims:
            product[dims] = _numbers([arrays[d] for d in dims], [sizes[d] for d in dims], mask)
    return product


def _numbers(
    indices: Sequence[np.ndarray], sizes: Sequence[int], mask: np.ndarray | None
) -> np.ndarray:
    """Distinct tuples of indices as sorted numbers."""
    shape = joint_shape(indices) if mask is None else mask.shape
    if math.prod(shape) > LIMIT:
        raise TooManyError
    number = np.zeros((1,) * len(shape), np.int64)
    for index, size in zip(indices, sizes, strict=True):
        number = number * size + np.clip(index, 0, size - 1)
    number = number.ravel() if mask is None else np.broadcast_to(number, shape)[mask]
    return distinct(number, math.prod(sizes))


def distinct(numbers: np.ndarray, size: int) -> np.ndarray:
    """The different ones of numbers below `size`, sorted."""
    if size <= min(BITMAP, 32 * numbers.size + 65536):
        flags = np.zeros(size, bool)
        flags[numbers] = True
        return np.flatnonzero(flags)
    ordered = np.sort(numbers)
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def widened(product: Product, dimension: int, lanes: int, sizes: Sequence[int]) -> Product:
    """The set with `lanes` - 1 more places behind each, in the last dimension."""
    if lanes == 1:
        return product
    dims = next(d for d in product if dimension in d)
    more = (product[dims][:, None] + np.arange(lanes)).ravel()
    return product | {dims: distinct(more, math.prod(sizes[d] for d in dims))}


def size_of(product: Product) -> int:
    """How many places there are."""
    return math.prod(len(numbers) for numbers in product.values())


def united(products: Sequence[Product], sizes: Sequence[int]) -> int:
    """How many places are in at least one of the sets; TooManyError when that is hard to say."""
    if not products:
        return 0
    partition = _partition(products)
    ranges = [math.prod(sizes[d] for d in group) for group in partition]
    rows = _merged([_repartitioned(p, partition, sizes) for p in products], ranges)
    if len(rows) == 1 or all(_are_apart(a, b) for a, b in _pairs(rows)):
        return sum(math.prod(len(part) for part in row) for row in rows)
    whole = tuple(range(len(sizes)))
    listed = [
        _repartitioned(dict(zip(partition, row, strict=True)), [whole], sizes)[0] for row in rows
    ]
    return len(distinct(np.concatenate(listed), math.prod(sizes)))


def _pairs(rows: Sequence[list[np.ndarray]]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    if len(rows) > 64:
        raise TooManyError
    yield from ((a, b) for i, a in enumerate(rows) for b in rows[:i])


def _are_apart(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return any(not np.intersect1d(x, y, assume_unique=True).size for x, y in zip(a, b, strict=True))


def _partition(products: Sequence[Product]) -> list[tuple[int, ...]]:
    """The finest grouping of dimensions that is no finer than that of any set."""
    groups: list[set[int]] = []
    for dims in (d for p in products for d in p):
        joined = set(dims)
        rest = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                rest.append(group)
        groups = [*rest, joined]
    return sorted(tuple(sorted(g)) for g in groups)


def _repartitioned(
    product: Product, partition: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> list[np.ndarray]:
    """The same set with coarser groups of dimensions, in the order of `partition`."""
    return [_joined({d: n for d, n in product.items() if d[0] in g}, g, sizes) for g in partition]


def _joined(parts: Product, dims: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """All combinations of the parts, as numbers over all of `dims`."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    if size_of(parts) > LIMIT:
        raise TooManyError
    total = np.zeros(1, np.int64)
    for group, numbers in parts.items():
        moved = np.zeros(len(numbers), np.int64)
        rest = numbers
        for d in reversed(group):
            moved += rest % sizes[d] * math.prod(sizes[e] for e in dims if e > d)
            rest = rest // sizes[d]
        total = (total[:, None] + moved).ravel()
    return np.sort(total)


def _merged(rows: list[list[np.ndarray]], ranges: Sequence[int]) -> list[list[np.ndarray]]:
    """Sets that differ in one group of dimensions only are one set; ranges: of their numbers."""
    while True:
        before = len(rows)
        for at in range(len(ranges)):
            rows = _merged_at(rows, at, ranges[at])
        if len(rows) in (1, before):
            return rows


def _merged_at(rows: list[list[np.ndarray]], at: int, most: int) -> list[list[np.ndarray]]:
    alike: dict[tuple[bytes, ...], list[list[np.ndarray]]] = {}
    for row in rows:
        key = tuple(part.tobytes() for i, part in enumerate(row) if i != at)
        alike.setdefault(key, []).append(row)
    return [_one_of(same, at, most) if len(same) > 1 else same[0] for same in alike.values()]


def _one_of(rows: list[list[np.ndarray]], at: int, most: int) -> list[np.ndarray]:
    """Rows that are the same but at one place."""
    joined = distinct(np.concatenate([row[at] for row in rows]), most)
    return [joined if i == at else part for i, part in enumerate(rows[0])]
