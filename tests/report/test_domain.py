"""F: sets of places counted wrongly. Products of independent parts against plain enumeration."""

from __future__ import annotations

import itertools
import operator
import random

import numpy as np
import pytest

from k3tvm.report.domain import Domain, places, size_of, united, widened
from k3tvm.report.values import UNKNOWN, Data, combine, divided, floor_remainder, reduced

EXTENTS = (3, 4, 5)
SIZES = (6, 9, 8)


def axis(i: int) -> np.ndarray:
    return np.arange(EXTENTS[i]).reshape([-1 if j == i else 1 for j in range(i + 1)])


def random_index(rng: random.Random, size: int) -> np.ndarray | int:
    """A sum of multiples of some axes, below `size`."""
    value: np.ndarray | int = rng.randrange(size)
    for i in rng.sample(range(3), rng.randrange(3)):
        value = combine(np.add, value, axis(i) * rng.randrange(1, 4))
    return combine(np.remainder, value, size)


def random_domain(rng: random.Random) -> Domain:
    conditions = []
    for _ in range(rng.randrange(3)):
        a, b = rng.sample(range(3), 2)
        conditions.append(combine(np.less, combine(np.add, axis(a), axis(b)), rng.randrange(2, 8)))
    return Domain(EXTENTS, tuple(np.asarray(c) for c in conditions))


def enumerated(domain: Domain, index: list[np.ndarray | int]) -> tuple[int, set[tuple[int, ...]]]:
    """Points of the domain, and the places, one by one."""
    count, found = 0, set()
    for point in itertools.product(*(range(e) for e in EXTENTS)):
        if all(at(c, point) for c in domain.conditions):
            count += 1
            found.add(tuple(int(at(i, point)) for i in index))
    return count, found


def at(array: np.ndarray | int, point: tuple[int, ...]) -> int:
    array = np.asarray(array)
    return array[tuple(min(p, n - 1) for p, n in zip(point, array.shape, strict=False))]


@pytest.mark.parametrize("seed", range(60))
def test_random_accesses_are_counted_as_if_one_by_one(seed):
    """Number of accesses, of places of one access, and of those of several together."""
    rng = random.Random(seed)
    products, wanted = [], set()
    for _ in range(rng.randrange(1, 4)):
        domain = random_domain(rng)
        index = [random_index(rng, n) for n in SIZES]
        count, found = enumerated(domain, index)
        assert domain.points == count
        product = places(domain, index, SIZES)
        assert (product is None) == (not found)
        if product is not None:
            assert size_of(product) == len(found)
            products.append(product)
        wanted |= found
    assert united(products, SIZES) == len(wanted)


@pytest.mark.parametrize("lanes", [2, 4])
def test_vectors_that_overlap_are_counted_once(lanes):
    index = axis(2)
    product = places(Domain(EXTENTS, ()), [0, 0, index], (1, 1, 16))
    assert product is not None
    assert size_of(widened(product, 2, lanes, (1, 1, 16))) == 5 + lanes - 1


def test_places_of_independent_parts_are_not_multiplied_out():
    """2^60 places, which nobody could enumerate."""
    extents = (1 << 20,) * 3
    lines = [np.arange(1 << 20).reshape((1,) * i + (-1,)) for i in range(3)]
    product = places(Domain(extents, ()), lines, extents)
    assert product is not None and size_of(product) == 1 << 60


def test_too_many_to_follow_are_still_bounded():
    """Comparisons with what is beyond the bounds stay certain, others become unknown."""
    rows = np.arange(1 << 13)
    wide = combine(operator.add, rows, np.arange(1 << 13).reshape(1, -1))
    assert wide == Data(least=0, most=2**14 - 2)
    assert combine(operator.lt, wide, 2**14) == 1
    assert combine(operator.lt, wide, 100) is UNKNOWN
    assert combine(floor_remainder, wide, 7) == Data(least=0, most=6)
    assert combine(np.where, UNKNOWN, wide, -3) == Data(least=-3, most=2**14 - 2)


@pytest.mark.parametrize("a, b, want", [(7, 2, 3), (-7, 2, -3), (7, -2, -3), (-7, -2, 3)])
def test_division_cuts_off(a, b, want):
    assert divided(np.asarray(a), np.asarray(b)) == want


def test_axes_without_influence_disappear():
    value = np.broadcast_to(np.arange(3).reshape(1, 3), (4, 3)).copy()
    assert reduced(value).shape == (1, 3)
    assert reduced(np.full((4, 3), 9)) == 9
