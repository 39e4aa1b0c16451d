"""The functions of CPU and GPU against float64: dense grids, extremes, lane counts, rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.relax_models.operators import Activation
from k3tvm.schedules import functions
from k3tvm.schedules import vector as v
from k3tvm.schedules.gpu import functions as gpu_functions
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.numerics import round_to, sigmoid
from k3tvm.schedules.profile import CpuProfile, GpuProfile, TargetProfile
from tests.kernels import compiled_function, device_of, gpu_profiles, host_profiles, profiles
from tests.tolerances import tolerance

EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(x, 0.0),
}
SMALLEST_NORMAL, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)

each_profile = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
each_host = pytest.mark.parametrize("profile", host_profiles(), ids=lambda p: p.name)


@cache
def kernel(name: str, profile: TargetProfile, lanes: int) -> Any:
    """out[i] = function(x[i]) in steps of `lanes`, on a GPU one by one."""
    index = "int64" if profile.family == "cpu" else "int32"
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        T.func_attr({"tirx.noalias": True})
        n = tvm.tirx.Var("n", index)
        x = T.match_buffer(T.arg("x", T.handle()), (n,), "float32")
        out = T.match_buffer(T.arg("out", T.handle()), (n,), "float32")
        if isinstance(profile, CpuProfile):
            with v.serial(n // v.int64(lanes)) as i:
                value = getattr(functions, name)(profile, v.load(x, i * lanes, lanes=lanes), lanes)
                v.store(out, value, i * lanes, lanes=lanes)
        else:
            with g.each(n) as i:
                g.store(out, gpu_value(name, x[i]), i)
    return compiled_function(name, builder.get(), profile)


def gpu_value(name: str, x: Any) -> Any:
    """A function of the GPU, or rounding to the activation dtype of that name."""
    if name in ("bfloat16", "float16"):
        return g.rounded(name, x)
    return getattr(gpu_functions, name)(x)


def apply(name: str, profile: TargetProfile, x: np.ndarray, lanes: int = 16) -> np.ndarray:
    """The function of every element, `lanes` at a time; x is padded with zeros."""
    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    call, device = kernel(name, profile, lanes), device_of(profile)
    out = tvm.runtime.tensor(np.full_like(padded, np.nan), device)
    call(tvm.runtime.tensor(padded, device), out)
    return out.numpy()[: len(x)]


def bound(name: str, profile: TargetProfile) -> float:
    """The largest error accepted, in units of the last place."""
    return tolerance(f"{name}_ulp") + (tolerance("gpu_ulp") if profile.family == "gpu" else 0.0)


def grid() -> np.ndarray:
    """Points that are dense where the functions bend, and every power of ten of both signs."""
    rng = np.random.default_rng(7)
    sizes = 10.0 ** rng.uniform(-44, 2.2, 100_000)
    parts = [np.linspace(-110, 110, 300_001), np.linspace(-1, 1, 200_001), sizes, -sizes]
    return np.concatenate(parts).astype(np.float32)


def ulp_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error in units of the last place, where the result is a normal float32."""
    normal = (np.abs(want) >= SMALLEST_NORMAL) & (np.abs(want) <= LARGEST)
    unit = np.spacing(np.abs(want[normal]).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(got[normal] - want[normal]) / unit))


@each_profile
@pytest.mark.parametrize("name", sorted(EXACT))
def test_error_in_units_of_the_last_place(profile: TargetProfile, name: str) -> None:
    x = grid()
    if name == "silu":  # its factor sigmoid is subnormal further out
        x = x[x > -87.0]
    with np.errstate(over="ignore"):
        want = EXACT[name](x.astype(np.float64))
    got = apply(name, profile, x).astype(np.float64)
    assert ulp_error(got, want) <= bound(name, profile)


@each_profile
@pytest.mark.parametrize("name", sorted(EXACT))
def test_subnormal_results_are_near_zero_and_never_nan(profile: TargetProfile, name: str) -> None:
    x = grid()
    with np.errstate(over="ignore"):
        want = EXACT[name](x.astype(np.float64))
    small = np.abs(want) < SMALLEST_NORMAL
    assert small.any()
    got = apply(name, profile, x[small]).astype(np.float64)
    assert np.all(np.abs(got - want[small]) <= SMALLEST_NORMAL)


EXTREMES = {
    "exp": [(np.inf, np.inf), (-np.inf, 0), (89, np.inf), (3e38, np.inf), (-3e38, 0), (0, 1)],
    "sigmoid": [(np.inf, 1), (-np.inf, 0), (3e38, 1), (-3e38, 0), (0, 0.5)],
    "silu": [(np.inf, np.inf), (-np.inf, np.nan), (3e38, 3e38), (-3e38, 0), (0, 0)],
    "tanh": [(np.inf, 1), (-np.inf, -1), (3e38, 1), (-3e38, -1), (1e-42, 1e-42)],
    "softplus": [(np.inf, np.inf), (-np.inf, 0), (3e38, 3e38), (-3e38, 0), (100, 100), (30, 30)],
}


@each_profile
@pytest.mark.parametrize("name", sorted(EXACT))
def test_f11_extremes(profile: TargetProfile, name: str) -> None:
    x, want = (np.array(side, np.float32) for side in zip(*EXTREMES[name], strict=True))
    np.testing.assert_array_equal(apply(name, profile, x), want)
    assert np.isnan(apply(name, profile, np.array([np.nan, -np.nan], np.float32))).all()


@each_profile
def test_tanh_keeps_the_sign_of_zero(profile: TargetProfile) -> None:
    got = apply("tanh", profile, np.array([0.0, -0.0], np.float32))
    assert np.signbit(got).tolist() == [False, True]


@each_host
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_every_lane_count_gives_the_same_bits(profile: CpuProfile, lanes: int) -> None:
    x = np.random.default_rng(3).uniform(-100, 100, 512).astype(np.float32)
    for name in EXACT:
        want = apply(name, profile, x)
        np.testing.assert_array_equal(apply(name, profile, x, lanes), want, err_msg=name)


@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
def test_f12_gpu_rounding_is_exact(profile: GpuProfile, act: Activation) -> None:
    """Every exponent, ties, subnormals, overflow: the bits of the reference."""
    words = np.random.default_rng(8).integers(0, 2**32, 200_000, np.uint32)
    ties = words[:50_000] & np.uint32(0xFFFFF000)
    small = (np.linspace(-(2.0**-13), 2.0**-13, 50_001)).astype(np.float32)
    edges = np.array([65504, 65519.996, 65520, 65536, 0, -0.0, np.inf, -np.inf], np.float32)
    x = np.concatenate([words.view(np.float32), ties.view(np.float32), small, edges])
    x = x[~np.isnan(x)]
    normal = (np.abs(x) >= SMALLEST_NORMAL) | (x == 0)
    got, want = apply(act, profile, x), round_to(act, x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(got[normal].view(np.uint32), want[normal].view(np.uint32))
    assert np.abs(got[~normal]).max() <= SMALLEST_NORMAL
    assert np.isnan(apply(act, profile, np.array([np.nan, -np.nan], np.float32))).all()


def test_interpolation_errors_are_far_below_rounding() -> None:
    r = np.linspace(-np.log(2) / 2, np.log(2) / 2, 1001)
    z = np.linspace(1e-6, 1 / 9, 1001)
    s = np.sqrt(z)
    exp = 1 + r + r * r * np.polyval(functions.EXP_TAIL[::-1], r)
    atanh = s + s**3 * np.polyval(functions.ATANH_TAIL[::-1], z)
    assert np.max(np.abs(exp / np.exp(r) - 1)) <= tolerance("interpolation")
    assert np.max(np.abs(atanh / np.arctanh(s) - 1)) <= tolerance("interpolation")
