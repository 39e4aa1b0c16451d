"""Kernels that spill registers for the sake of more warps get room for them."""

from __future__ import annotations

import re

from k3tvm.cuda import nvcc
from k3tvm.cuda.room import with_room
from tests.cuda.toolkit import require_toolkit

PTX = """.visible .entry first(
	.param .u64 first_param_0
)
.maxntid 256
.minnctapersm 4
{
	ret;
}
.visible .entry second(
	.param .u64 second_param_0
)
.maxntid 64
{
	ret;
}
"""
# Sixty-four values that are all needed at the end: more than 32 registers hold.
HUNGRY = """extern "C" __global__ void __launch_bounds__(256, BLOCKS) hungry(float* x) {
    float v[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[i * 256 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i) x[i * 256 + threadIdx.x] = v[i] * v[63 - i];
}
"""


def test_only_the_named_kernels_change():
    first = PTX.replace(".minnctapersm 4", ".minnctapersm 1")
    assert with_room(PTX, {"first"}) == first
    assert with_room(PTX, {"second"}) == PTX.replace(
        ".maxntid 64\n", ".maxntid 64\n.minnctapersm 1\n"
    )
    assert with_room(PTX, {"third"}) == PTX


def test_a_kernel_that_spills_is_compiled_again_with_room(monkeypatch, tmp_path):
    toolkit = require_toolkit()
    monkeypatch.setenv("K3TVM_CACHE", str(tmp_path))
    text = HUNGRY.replace("BLOCKS", "8")
    (built,) = nvcc.compile_all(toolkit, text, ["sm_80"])
    assert built.resources["hungry"].spill_bytes == 0
    assert built.resources["hungry"].registers > 64
    assert re.search(rb"\.minnctapersm 1\b", built.ptx)  # the PTX for later GPUs, too
    monkeypatch.setattr(nvcc, "with_room", lambda ptx, names: ptx)
    (plain,) = nvcc.compile_all(toolkit, text + "\n", ["sm_80"])
    assert plain.resources["hungry"].spill_bytes > 0
