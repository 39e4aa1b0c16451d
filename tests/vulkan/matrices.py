"""Puts arrays in place of cooperative matrices, so that drivers without them run such kernels.

The threads of a subgroup share the rows of a result; every one holds the right factor whole.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from k3tvm.vulkan.glsl.kernel import Shader, translate

# Loops, and no functions: unrolled or copied, matrices take drivers minutes to compile.
ARRAYS = """
#define gl_CooperativeMatrixLayoutRowMajor 0
#define gl_CooperativeMatrixLayoutColumnMajor 1
#define LOOP(i) [[dont_unroll]] for (int i = 0; i < 16; ++i)
#define MINE(i) [[dont_unroll]] for (uint i = LANE; i < 16; i += LANES)
#define AT(p, s, l) (p) + (l == 0 ? r * (s) + q : q * (s) + r)
#define load_a(m, x, p, s, l) MINE(r) LOOP(q) m[r * 16 + q] = float(x[AT(p, s, l)])
#define load_b(m, x, p, s, l) LOOP(r) LOOP(q) m[r * 16 + q] = float(x[AT(p, s, l)])
#define fill_c(m, x) MINE(r) LOOP(q) m[r * 16 + q] = x
#define store_c(m, x, p, s, l) MINE(r) LOOP(q) x[AT(p, s, l)] = m[r * 16 + q]
#define multiply(c, a, b) MINE(r) LOOP(q) { float sum = c[r * 16 + q]; \\
  LOOP(k) sum += a[r * 16 + k] * b[k * 16 + q]; c[r * 16 + q] = sum; }
void main() {"""
REPLACED = (
    (r"#extension GL_KHR_(coop|memory_scope)\w+ : require\n", ""),
    (r"(k3_c\d+) = coopmat<[^>]*>\(", r"fill_c(\1, "),
    (r"coopmat<[^>]*> (\w+);", r"float \1[256];"),
    (r"(k3_c\d+) = coopMatMulAdd\((\w+), (\w+), \1\)", r"multiply(\1, \2, \3)"),
    (r"coopMatLoad\((k3_([ab]))", r"load_\2(\1"),
    (r"coopMatStore\((k3_c)", r"store_c(\1"),
)


def with_arrays(source: str, subgroup: int = 0) -> str:
    """The shader with arrays in place of cooperative matrices.

    subgroup: as if subgroups had so many threads; 0 for those of the device.
    """
    for pattern, text in REPLACED:
        source = re.sub(pattern, text, source)
    lane, lanes = "gl_SubgroupInvocationID", "gl_SubgroupSize"
    if subgroup:
        size = re.search(r"local_size_x = (\d+)", source)
        assert size is not None
        source = source.replace("gl_NumSubgroups", f"{int(size[1]) // subgroup}")
        source = source.replace("gl_SubgroupID", f"gl_LocalInvocationID.x / {subgroup}")
        lane, lanes = f"(gl_LocalInvocationID.x % {subgroup})", str(subgroup)
    counts = f"#define LANE {lane}\n#define LANES {lanes}"
    return source.replace("void main() {", f"{counts}{ARRAYS}")


def translator(subgroup: int = 0) -> Callable[[Any, int], Shader]:
    """A `translate` whose shaders with cooperative matrices have arrays instead."""

    def translated(function: Any, push_bytes: int = 128) -> Shader:
        made = translate(function, push_bytes)
        if "coopmat<" not in made.source:
            return made
        return dataclasses.replace(made, source=with_arrays(made.source, subgroup))

    return translated
