"""The model's products by cooperative matrices: valid, asked for, with the right numbers (F25).

Drivers at hand have no such matrices; numbers are those of arrays in their place (`matrices`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tvm.bundle.manifest import Manifest
from k3tvm.compiler.targets.vulkan import vulkan_profile
from k3tvm.errors import DeviceError
from k3tvm.relax_models.operators import Activation, ExpertLinear, Linear, Operator, WeightFormat
from k3tvm.runtime.engine import Engine
from k3tvm.schedules.gpu import linear, products_many
from k3tvm.schedules.gpu.products_matrix import AREA, MOST, PITCH, deal, product_of
from k3tvm.schedules.profile import GpuProfile
from k3tvm.vulkan import build
from tests import test_experts, test_linear
from tests.bundles import Bundles
from tests.devices import require
from tests.kernels import device_functions, expect, relative_error, run
from tests.tolerances import tolerance
from tests.vulkan.matrices import translator

TARGET = "nvidia+cooperative_matrix"
FORMATS: tuple[WeightFormat, ...] = ("float32", "bfloat16", "mxfp4")
Array = np.ndarray


def product(fmt: WeightFormat, rows: int = 35, groups: int = 1, **changes: object) -> Linear:
    """x is a slice of its row; k fills no fragment where the format allows that."""
    op = test_linear.operator(fmt, rows, 96 if fmt == "mxfp4" else 83, groups)
    return replace(op, act="float16", **changes)


def experts(fmt: WeightFormat) -> ExpertLinear:
    """Fewer pairs than a tile for most experts."""
    shape = (3, 2, 70, 64, True) if fmt == "mxfp4" else (3, 2, 35, 37, False)
    return replace(test_experts.operator(fmt, *shape), act="float16")


def kernels(op: Operator, profile: GpuProfile) -> list[bool]:
    """Compile, validate, check against the profile: which kernels ask for cooperative matrices."""
    return ["cooperative_matrix" in k.features for k in device_functions(op, profile)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_kernels_for_many_rows_are_valid_and_ask_for_the_feature(fmt: WeightFormat) -> None:
    """One row, few rows, then small tiles, and large ones where the matrix has many rows."""
    profile = vulkan_profile(TARGET)
    assert kernels(product(fmt), profile) == [False, False, True]
    assert kernels(product(fmt, 16400, addends=1), profile) == [False, False, True, True]
    assert kernels(experts(fmt), profile) == [False, False, True]


def test_router_logits_have_the_exact_product() -> None:
    """Exact rows have kernels of their own, and there is no other where all are exact."""
    profile = vulkan_profile(TARGET)
    assert kernels(product("bfloat16", exact_rows=3), profile) == [False, False, False, True]
    assert not any(kernels(product("bfloat16", exact_rows=35), profile))


@pytest.mark.parametrize(
    ("target", "act"), [(TARGET, "float32"), (TARGET, "bfloat16"), ("nvidia", "float16")]
)
def test_without_the_feature_or_float16_activations_kernels_are_the_others(
    target: str, act: Activation
) -> None:
    for op in (product("mxfp4"), experts("mxfp4")):
        assert not any(kernels(replace(op, act=act), vulkan_profile(target)))


@pytest.mark.parametrize("size", [(32, 32), (32, 64), (64, 64)])
@pytest.mark.parametrize("subgroup", [0, 4, 8, 16, 32, 64, 128])
def test_f25_the_deal_covers_the_tile_within_the_limits(
    size: tuple[int, int], subgroup: int
) -> None:
    profile = replace(vulkan_profile(TARGET), subgroup=subgroup)
    plan, (height, width) = deal(profile, *size), size
    assert (plan.down * plan.high, plan.across * plan.wide) == (height // 16, width // 16)
    assert plan.fragments <= MOST
    needed = (height + width) * PITCH * 2 + plan.rectangles * AREA * 4
    for shared, able in ((needed, True), (needed - 1, False)):
        chosen = product_of(replace(profile, shared_bytes=shared), "float16", [size])
        assert (chosen is not products_many.matmul) == able


def on_lavapipe(monkeypatch: pytest.MonkeyPatch, subgroup: int, expected: int = 32) -> GpuProfile:
    """A profile whose kernels have arrays in place of matrices, as if subgroups were that large."""
    monkeypatch.setattr(build, "translate", translator(subgroup))
    profile = vulkan_profile("lavapipe+cooperative_matrix")
    # kernels are kept by their profile, so each translation has one
    return replace(profile, name=f"arrays-{subgroup}-{expected}", subgroup=expected)


def inputs(op: Linear, count: int) -> dict[str, Array]:
    made = test_linear.inputs(op, count, test_linear.weight_of(op), count)
    return made | {name: halves(a) for name, a in made.items() if not name.startswith("weight")}


def halves(array: Array) -> Array:
    """Values that float16 can hold, as float16 activations are."""
    return array.astype(np.float16).astype(np.float32)


def check(op: Operator, profile: GpuProfile, given: dict[str, Array]) -> Array:
    got, want = run(op, profile, given)["out"], expect(op, given)["out"]
    assert relative_error(got, want) <= tolerance("linear", "float16")
    return got


@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_has_the_right_numbers(monkeypatch: pytest.MonkeyPatch, fmt: WeightFormat) -> None:
    """Tiles that are not full in both directions, with a sum after the product."""
    op, profile = product(fmt, 70, groups=2, addends=1), on_lavapipe(monkeypatch, 32)
    for count in (17, 32, 33, 65):
        check(op, profile, inputs(op, count))


# threads of a subgroup, and how many were expected: rounds when too few, idle ones when too many
@pytest.mark.parametrize(("real", "expected"), [(128, 32), (64, 8), (8, 64), (16, 128)])
def test_the_size_of_a_subgroup_does_not_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, real: int, expected: int
) -> None:
    op = product("bfloat16", 70)
    given = inputs(op, 35)
    want = run(op, on_lavapipe(monkeypatch, 32), given)["out"]
    got = run(op, on_lavapipe(monkeypatch, real, expected), given)["out"]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_have_the_right_numbers(monkeypatch: pytest.MonkeyPatch, fmt: WeightFormat) -> None:
    """An expert without rows, one with a few, one with more than a tile."""
    profile, op = on_lavapipe(monkeypatch, 32), experts(fmt)
    chosen = np.array([0] * 45 + [1] * 3, np.int32)
    chosen = np.random.default_rng(2).permutation(chosen).reshape(-1, 2)
    given = test_experts.inputs(op, test_experts.weight_of(op), chosen)
    check(op, profile, given | {"x": halves(given["x"])})


def test_f5_a_row_has_the_same_bits_in_large_and_small_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "BUSY", 1)  # large tiles from 33 rows on
    profile, op = on_lavapipe(monkeypatch, 32), product("bfloat16", 70, addends=2)
    profile = replace(profile, name="arrays-large")
    given = inputs(op, 65)
    large = check(op, profile, given)
    part = {name: a if name == "weight" else a[40:] for name, a in given.items()}
    np.testing.assert_array_equal(check(op, profile, part), large[40:])


def test_exact_rows_have_the_bits_of_the_exact_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that float16 rounds: the others differ from the exact product, but not by much."""
    op = product("float32", 70, exact_rows=20)
    given = inputs(op, 33)
    got = check(op, on_lavapipe(monkeypatch, 32), given)
    exact = run(op, vulkan_profile("lavapipe"), given)["out"]
    np.testing.assert_array_equal(got[:, :20], exact[:, :20])
    assert (got[:, 32:] != exact[:, 32:]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_f11_a_bad_number_stays_bad_and_in_its_row(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    profile, op = on_lavapipe(monkeypatch, 32), product("bfloat16")
    given = inputs(op, 20)
    clean = run(op, profile, given)["out"]
    given["x"][1, op.x_offset + op.k - 1] = bad
    got = run(op, profile, given)["out"]
    assert not np.isfinite(got[1]).any()
    np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))


def test_f25_a_model_compiles_and_a_device_without_matrices_refuses_it(bundles: Bundles) -> None:
    require("vulkan")
    bundle = bundles.bundle("k3-tiny", "float16", f"vulkan:{TARGET}")
    (code,) = Manifest.load(bundle).code
    assert any("cooperative_matrix" in k.features for k in code.device_kernels)
    with pytest.raises(DeviceError, match="cannot run.*has no cooperative_matrix") as caught:
        Engine.open(bundle, device="vulkan")
    assert "\n" not in str(caught.value)
