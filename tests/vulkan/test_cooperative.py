"""Cooperative matrices: a product is valid, has the right indices, is refused where absent (F25).

No driver at hand has them. The shader is validated as it is; its numbers are checked after
replacing the matrices by arrays that every thread holds whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from k3tvm._tvm import IRBuilder, T
from k3tvm.compiler import lowering
from k3tvm.errors import TargetError
from k3tvm.vulkan import build
from k3tvm.vulkan.spirv import compile_one, features
from tests.vulkan.matrices import translator
from tests.vulkan.shaders import PROFILE, function, run, shader

M, N_, K = 32, 48, 64
TILE, GROUP = 16, 2  # a workgroup makes GROUP x 1 tiles, shared out among its subgroups


def matmul(a: Any, b: Any, c: Any) -> None:
    """C[M, N] = A[M, K] B[N, K]^T, whatever the size of a subgroup."""
    with T.launch_thread("blockIdx.y", M // (TILE * GROUP)) as by:
        with T.launch_thread("blockIdx.x", N_ // TILE) as bx:
            with T.launch_thread("threadIdx.x", 64):
                tile = IRBuilder.name("tile", T.alloc_buffer((1,), "int32", scope="local"))
                T.buffer_store(tile, T.call_extern("int32", "gl_SubgroupID"), [0])
                with T.While(tile[0] < GROUP):
                    one_tile(a, b, c, by * GROUP + tile[0], bx)
                    stride = T.call_extern("int32", "gl_NumSubgroups")
                    T.buffer_store(tile, tile[0] + stride, [0])


def one_tile(a: Any, b: Any, c: Any, row: Any, column: Any) -> None:
    """The 16 x 16 results of a tile."""
    operation("fill", "c", 0, T.float32(0))
    with T.serial(0, K // TILE) as k:
        operation("load", "a", 0, T.address_of(a[row * TILE * K + k * TILE]), K, "row")
        operation("load", "b", 0, T.address_of(b[column * TILE * K + k * TILE]), K, "column")
        operation("mma", 0, 0, 0)
    operation("store", "c", 0, T.address_of(c[row * TILE * N_ + column * TILE]), N_, "row")


def operation(word: str, *arguments: Any) -> None:
    """One call of the vocabulary."""
    T.evaluate(T.call_extern("int32", f"k3_coopmat_{word}", *arguments))


def product() -> Any:
    shapes = ((M * K,), "float16"), ((N_ * K,), "float16"), ((M * N_,), "float32")
    return function(matmul, *shapes)


def test_product_is_valid_and_says_what_it_needs():
    made = shader(product())
    needed = features(compile_one(made.source, "matmul"), "matmul")
    assert needed == {"cooperative_matrix", "float16", "storage16"}
    assert sorted(made.kinds) == ["P", "p", "p"]


def test_target_without_cooperative_matrices_refuses():
    plain = dataclasses.replace(PROFILE, features=PROFILE.features - {"cooperative_matrix"})
    with pytest.raises(TargetError, match="kernel_kernel: needs cooperative_matrix, which test"):
        with lowering.device_code(plain):
            run(product(), [], np.zeros(0))


def test_product_has_the_right_numbers(monkeypatch):
    monkeypatch.setattr(build, "translate", translator())
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-4, 5, (n, K)).astype("float16") for n in (M, N_))
    got = run(product(), [a.ravel(), b.ravel()], np.zeros(M * N_, "float32"))
    assert np.array_equal(got.reshape(M, N_), a.astype("float32") @ b.astype("float32").T)
