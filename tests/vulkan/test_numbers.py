"""Functions on a real driver against float64, in units of the last place and at the edges (F29)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from k3tvm._tvm import T
from tests.tolerances import tolerance
from tests.vulkan.shaders import function, run

N = 1 << 16
Array = np.ndarray[Any, Any]


def apply(operation: Any, *inputs: Array) -> Array:
    """operation(inputs) element by element on the device; the length is a multiple of 256."""

    def body(*buffers: Any) -> None:
        with T.launch_thread("blockIdx.x", inputs[0].size // 256) as bx:
            with T.launch_thread("threadIdx.x", 256) as tx:
                i = bx * 256 + tx
                T.buffer_store(buffers[-1], operation(*(b[i] for b in buffers[:-1])), [i])

    arguments = [(a.shape, str(a.dtype)) for a in (*inputs, inputs[0])]
    return run(function(body, *arguments), inputs, np.zeros_like(inputs[0]))


def spread(low: float, high: float) -> Array:
    """Evenly spaced numbers."""
    return np.linspace(low, high, N).astype("float32")


def orders(low: float, high: float) -> Array:
    """Numbers from exp(low) to exp(high), evenly in the exponent."""
    return np.exp(np.linspace(low, high, N)).astype("float32")


FUNCTIONS = {
    "exp": (T.exp, np.exp),
    "log": (T.log, np.log),
    "tanh": (T.tanh, np.tanh),
    "erf": (T.erf, np.vectorize(math.erf)),
    "sigmoid": (T.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
}
RANGES = [
    ("exp", spread(-1, 1)),
    ("exp", spread(-87, 88.7)),
    ("log", spread(0.5, 2)),
    ("log", orders(-87, 88)),
    ("tanh", spread(-12, 12)),
    ("tanh", orders(-80, 4)),
    ("erf", spread(-6, 6)),
    ("erf", orders(-80, 4)),
    ("sigmoid", spread(-86, 86)),
]


@pytest.mark.parametrize(("name", "x"), RANGES, ids=[f"{n}_{x[0]:.3g}" for n, x in RANGES])
def test_units_of_the_last_place(name, x):
    operation, exact = FUNCTIONS[name]
    want = exact(x.astype("float64"))
    unit = np.spacing(np.maximum(np.abs(want), np.finfo("float32").tiny).astype("float32"))
    error = np.abs(apply(operation, x) - want) / unit
    assert error.max() <= tolerance("vulkan_ulp")


INF, NAN = math.inf, math.nan
EDGES = np.array([0.0, INF, -INF, NAN, 100, -100, 1e30, -1e30] * 32, "float32")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("exp", [1, INF, 0, NAN, INF, 0, INF, 0]),
        ("log", [-INF, INF, NAN, NAN, math.log(100), NAN, math.log(1e30), NAN]),
        ("tanh", [0, 1, -1, NAN, 1, -1, 1, -1]),
        ("erf", [0, 1, -1, NAN, 1, -1, 1, -1]),
        ("sigmoid", [0.5, 1, 0, NAN, 1, 0, 1, 0]),
    ],
)
def test_edges(name, want):
    """Infinity over infinity must not become NaN, nor NaN a number."""
    got = apply(FUNCTIONS[name][0], EDGES)[:8]
    assert np.allclose(got, want, rtol=1e-6, atol=1e-37, equal_nan=True)


def test_nan_and_infinity_are_seen():
    one, zero = T.float32(1), T.float32(0)
    nan = apply(lambda x: T.Select(T.isnan(x), one, zero), EDGES)
    inf = apply(lambda x: T.Select(T.isinf(x), one, zero), EDGES)
    assert np.array_equal(nan != 0, np.isnan(EDGES))
    assert np.array_equal(inf != 0, np.isinf(EDGES))


def test_every_half_survives_both_ways():
    """All 65536 bit patterns: subnormals, infinities, and NaN as NaN."""
    bits = np.arange(1 << 16, dtype="uint16")
    halves = bits.view("float16")
    got = apply(lambda x: T.cast(T.cast(x, "float32") * T.float32(1), "float16"), halves)
    nan = np.isnan(halves)
    assert np.array_equal(got.view("uint16")[~nan], bits[~nan])
    assert np.isnan(got[nan]).all()


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_division_of_negatives(kind):
    rng = np.random.default_rng(3)
    a = rng.integers(-1000, 1000, 1024).astype(kind)
    b = rng.integers(1, 40, 1024).astype(kind) * rng.choice([-1, 1], 1024).astype(kind)
    assert np.array_equal(apply(T.floordiv, a, b), a // b)
    assert np.array_equal(apply(T.floormod, a, b), a % b)
    assert np.array_equal(apply(T.truncmod, a, b), np.fmod(a, b))


@pytest.mark.parametrize("kind", ["float32x2", "uint16x4", "uint8x8", "uint64", "float16x4"])
def test_bits_are_regrouped(kind):
    """Eight bytes as one type, moved as another, are the same eight bytes."""
    data = np.random.default_rng(4).integers(0, 2**32, 512, "uint32")
    lanes = int(kind.split("x")[1]) if "x" in kind else 1

    def body(a: Any, b: Any) -> None:
        with T.launch_thread("threadIdx.x", 256) as tx:
            pair = T.Ramp(tx * 2, 1, 2)
            middle = T.reinterpret(kind, a[pair])
            T.buffer_store(b, T.reinterpret("uint32x2", middle), [pair])

    made = function(body, ((512,), "uint32"), ((512,), "uint32"))
    if lanes > 4:
        with pytest.raises(Exception, match="lanes"):
            run(made, [data], data * 0)
    else:
        assert np.array_equal(run(made, [data], data * 0), data)
