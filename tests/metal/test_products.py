"""Products by matrices of SIMD groups: where they are used, how tiles are dealt out, their sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tvm import emulate
from k3tvm.compiler.targets.metal import metal_emulated_profile, metal_profile
from k3tvm.compiler.targets.vulkan import vulkan_profile
from k3tvm.relax_models.operators import Linear
from k3tvm.schedules.gpu import products_many, products_simdgroup
from k3tvm.schedules.gpu.products_matrix import is_exact, product_of
from k3tvm.schedules.gpu.products_simdgroup import GROUPS, PITCH, SIDE, deal, pool_size
from tests.kernels import compile_operator, run
from tests.test_linear import inputs, operator, weight_of

SIZES = [(32, 32), (64, 64), (32, 64), (16, 64), (16, 32), (128, 64)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_every_fragment_has_one_group(height, width):
    plan = deal(height, width)
    owners = np.zeros((height // SIDE, width // SIDE), int)
    for group in range(GROUPS):
        row, column = group // plan.across * plan.high, group % plan.across * plan.wide
        owners[row : row + plan.high, column : column + plan.wide] += 1
    assert (owners == 1).all()
    assert pool_size(height, width) >= max(height * width, (height + width) * PITCH)


def test_f25_they_need_the_feature_and_room():
    metal, size = metal_profile(), [(64, 64)]
    for act in ("float32", "bfloat16", "float16"):
        assert product_of(metal, act, size) is products_simdgroup.matmul
    for lacking in (
        replace(metal, features=metal.features - {"simdgroup_matrix"}),
        replace(metal, shared_bytes=16384),
        replace(metal, threads=64),
        vulkan_profile("lavapipe"),
    ):
        assert product_of(lacking, "float32", size) is products_many.matmul
    assert is_exact(products_simdgroup.matmul) and is_exact(products_many.matmul)
    cooperative = replace(metal, kind="vulkan", features=metal.features - {"simdgroup_matrix"})
    cooperative = replace(cooperative, features=cooperative.features | {"cooperative_matrix"})
    assert not is_exact(product_of(cooperative, "float16", [(32, 32)]))


def test_the_source_multiplies_matrices_in_32_kibibytes():
    op = Linear(640, 7168, "mxfp4", "float32", 7168, 0, 1, 0, 0, 0)
    kernels = [k for k in compile_operator(op, metal_profile())[1] if "simdgroup_" in k.text]
    assert kernels
    for kernel in kernels:
        assert "simdgroup_multiply_accumulate(" in kernel.text
        assert kernel.launch.shared_bytes <= 32768
        assert kernel.entry().features == ("simdgroup_matrix",)


def test_f5_three_orders_of_threads_give_the_same_bits():
    """A product with a barrier too few differs between them, or is NaN: memory is poisoned."""
    op = operator("bfloat16", 70, 600)
    weight = weight_of(op)
    given = inputs(op, 70, weight)
    results = []
    for seed in (0, 1, 7):
        emulate.install("metal")
        emulate.set_seed(seed)
        results.append(run(op, metal_emulated_profile(), given)["out"])
    emulate.set_seed(0)
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
