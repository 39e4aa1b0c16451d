"""The check of Metal source refuses what Apple's compiler would, and says where it is (F27)."""

from __future__ import annotations

import pytest

from k3tvm.errors import TargetError
from k3tvm.metal.check import check_kernels

KERNEL = """\
#include <metal_stdlib>
using namespace metal;

union __TVMArgUnion {
 int v_int[2];
};

struct NAME_args_t {
  int n[2];
};

[[max_total_threads_per_threadgroup(64)]]
kernel void NAME(  device float* x [[ buffer(0) ]],
  device int* y [[ buffer(1) ]],
  constant NAME_args_t& arg [[ buffer(2) ]],
  uint2 blockIdx [[threadgroup_position_in_grid]],
  uint2 threadIdx [[thread_position_in_threadgroup]]
) {
  alignas(16) threadgroup float s[64];
  alignas(16) thread float t[4];
  simdgroup_float8x8 m[1];
  BODY
}
"""


def kernel(body: str, name: str = "probe") -> str:
    return KERNEL.replace("NAME", name).replace("BODY", body)


GOOD = [
    "*(device float4*)(x + arg.n[0]) = *(thread float4*)(t + 0);",
    "*(threadgroup float4*)(s + 4) = float4(t[0], t[1], 0.0f, 1.0f);",
    "threadgroup_barrier(mem_flags::mem_threadgroup);",
    "x[((long)y[0]) * (long)7] = as_type<float>(as_type<int>(t[0]) & 2147483647);",
    "x[0] = select(t[0], -INFINITY, (t[1] < 0.0f)); y[0] = min(y[1], (int)threadIdx.x);",
    "simdgroup_load(m[0], (&(s[8])), 36, 0, (bool)1);",
    "m[0] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);",
    "simdgroup_multiply_accumulate(m[0], m[0], m[0], m[0]); simdgroup_store(m[0], x, 8, 0, 0);",
    "uint4 w = *(device uint4*)(y + 4); x[0] = as_type<float>(((w)[0] << (uint)16));",
]

BAD = {
    "device float* p = s; p[0] = 1.0f;": "device",
    "threadgroup_barrier(mem_threadgroup);": "mem_threadgroup",
    "float a = float4(t[0], t[1], t[2], t[3]);": "float",
    "float4 a = float4(t[0], t[1], t[2], t[3]) + int4(1, 2, 3, 4);": "vector",
    "float4 a = float4(t[0], t[1]);": "elements",
    "x[0] = as_type<float>((long)1);": "as_type",
    "x[0] = as_type<float>(-2147483648);": "as_type",
    "x[0] = erfcf(t[0]);": "erfcf",
    "x[0] = expf(t[0]);": "expf",
    "x[0] = __builtin_expf(1, 2);": "builtin|argument",
    "y[0] = min((int)threadIdx.x, (long)1);": "ambiguous",
    "x[0] = max(t[0], 1);": "ambiguous",
    "x[0] = select(t[0], t[1], float4(t[0], t[1], t[2], t[3]));": "select",
    "if (y[0]) {\n    alignas(16) threadgroup float u[8];\n    u[0] = 1.0f;\n  }": "outermost",
    "thread int vertex = 1; y[0] = vertex;": "",
    "float* p = t; p[0] = 1.0f;": "address space",
    "x[0] = *(float4*)(t + 0)[0];": "address space",
    "*(device float4*)(s + 0) = 1.0f;": "address space|cast",
    "simdgroup_load(m[0], y, 8, 0, 0);": "simdgroup_load",
    "x[0] = undeclared;": "undeclared",
}


def test_what_kernels_do_is_accepted():
    check_kernels({f"good_{i}": kernel(body, f"good_{i}") for i, body in enumerate(GOOD)})


@pytest.mark.parametrize("body", BAD)
def test_f27_what_metal_does_not_know_is_refused(body):
    good = {f"good_{i}": kernel(GOOD[i], f"good_{i}") for i in range(3)}
    with pytest.raises(TargetError, match=f"probe.*({BAD[body]})") as failure:
        check_kernels(good | {"probe": kernel(body)})
    assert body.splitlines()[0].split(";")[0][:30] in str(failure.value) or "\n" in body


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("[[ buffer(1) ]]", "[[ buffer(31) ]]", "31 buffers"),
        ("[[thread_position_in_threadgroup]]", "[[thread_position]]", "attribute thread_position"),
        ("  int n[2];\n", "".join(f"  int n{i}[2];\n" for i in range(513)), "4096 bytes"),
        ("arg [[ buffer(2) ]]", "vertex [[ buffer(2) ]]", "vertex"),
        ("device int* y", "int* y", "no address space"),
    ],
)
def test_f27_what_a_kernel_takes(old, new, fault):
    assert old in KERNEL
    with pytest.raises(TargetError, match=fault):
        check_kernels({"probe": kernel("").replace(old, new)})
