"""What is changed in TVM's Metal source, and that constants keep their digits on the way (F27)."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.compiler import lowering
from k3tvm.compiler.targets.metal import metal_profile
from k3tvm.errors import TargetError
from k3tvm.metal.msl import cleaned, name_of
from k3tvm.relax_models.operators import ExpertCombine, RmsNorm
from k3tvm.schedules.gpu import grid as g
from tests.kernels import compile_operator

TEXT = """\
#include <metal_stdlib>
using namespace metal;

kernel void twice(  device float* x [[ buffer(0) ]],
  uint blockIdx [[threadgroup_position_in_grid]],
  uint threadIdx [[thread_position_in_threadgroup]]
) {
  thread float v_1[4];
  thread float v_2[1];
  if (((int)blockIdx) < 3) {
    threadgroup float v_3[128];
    threadgroup float4 v_4[2];
    *(device float4*)(x + 0) = *(thread float4*)(v_1 + 0);
    v_2[0] = as_type<float>((as_type<int>(v_1[0]) & -2147483648));
  }
}
"""


def test_threadgroup_memory_stands_at_the_top_of_the_kernel():
    text = cleaned(TEXT, 64)
    inside = text[text.index(") {\n") :]
    first, second, third = inside.splitlines()[1:4]
    assert first == "  alignas(16) threadgroup float v_3[128];"
    assert second == "  alignas(16) threadgroup float4 v_4[2];"
    assert "threadgroup" not in inside.split("v_4[2];", 1)[1]
    assert "v_1" in third


def test_arrays_that_are_read_as_vectors_are_aligned_for_it():
    text = cleaned(TEXT, 64)
    assert "  alignas(16) thread float v_1[4];" in text
    assert "\n  thread float v_2[1];" in text


def test_the_compiler_is_told_how_many_threads_there_are():
    text = cleaned(TEXT, 96)
    assert "[[max_total_threads_per_threadgroup(96)]]\nkernel void twice(" in text
    assert name_of(text) == "twice"


def test_the_least_integer_is_an_int():
    """-2147483648 is a long in C++, and as_type<float> of a long an error."""
    assert "& (-2147483647 - 1))" in cleaned(TEXT, 64)


def test_f27_values_handed_on_through_device_memory_are_ordered():
    """Norms of experts' sums read rows that other threads wrote to the result before."""
    _, kernels = compile_operator(ExpertCombine(2, 100, True, 1e-5, 0, "float32"), metal_profile())
    flags = [re.findall(r"_barrier\((.*?)\)", k.text) for k in kernels]
    assert all(f == "mem_flags::mem_device | mem_flags::mem_threadgroup" for f in sum(flags, []))
    _, kernels = compile_operator(RmsNorm(100, 1e-5, "float32"), metal_profile())
    assert "mem_flags::mem_threadgroup" in kernels[0].text and "mem_device" not in kernels[0].text


def test_f27_a_text_of_another_generator_is_refused():
    for text in ("", TEXT + TEXT.replace("twice", "thrice"), TEXT.replace("kernel void", "void")):
        with pytest.raises(TargetError, match="kernels were found"):
            cleaned(text, 64)


VALUES = [12582912.0, -355.0 / 512, 1 / 3, 1e-42, 16777216.0, 16777215.0, 3.4e38, 0.1, 2.0**-126]


def test_f27_constants_keep_their_digits():
    """TVM prints seven digits, which would make 12582910 of 12582912."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("constants")
        x = T.match_buffer(T.arg("x", T.handle()), (len(VALUES),), "float32")
        with g.each(1):
            for i, value in enumerate(VALUES):
                g.store(x, g.floats(value), i)
    profile = metal_profile()
    module = tvm.IRModule({"constants": builder.get().with_attr("global_symbol", "constants")})
    with lowering.device_code(profile) as built:
        target = tvm.target.Target(profile.tvm_target())
        tvm.compile(module, target=target, tir_pipeline=lowering.register("metal"))
    (kernel,) = built
    printed = re.findall(r"\] = (-?[\d.]+e[+-]\d+)f;", kernel.text)
    got = [struct.pack("<f", float(p)) for p in printed]
    assert got == [np.float32(v).tobytes() for v in VALUES]
