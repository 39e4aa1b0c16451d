"""TVM's Metal source becomes Metal source that Apple's compiler accepts and compiles well.

TVM's generator knows the syntax of Metal, but not some of its rules. Threadgroup memory may only be
declared in the outermost scope of a kernel. A compiler that does not know how many threads a
threadgroup has must share its registers among 1024. An array of float is aligned to 4 bytes,
whatever is read from it: kernels read four at once. -2147483648 is a long, the negative of a number
that an int does not hold. And a barrier orders memory of the device only if it says so.

Arithmetic: TVM's runtime on the Mac compiles with fast-math. Kernels are written to survive that;
where the language is new enough (Metal 3.2, which TVM's runtime uses on Apple's newest systems),
the source asks for arithmetic as it is written.
"""

from __future__ import annotations

import re

from k3tvm.errors import TargetError
from k3tvm.metal.constants import shown

# A declaration as TVM writes it: one array, alone in its line
THREADGROUP = re.compile(r"^ *(threadgroup \w+ \w+\[\d+\];)\n", re.M)
KERNEL = re.compile(r"^kernel void (\w+)\(([^{]*)\) \{\n", re.M)
ARRAY = re.compile(r"^( *)(thread \w+ (\w+)\[\d+\];)$", re.M)
LEAST_INT = re.compile(r"(?<![\w.])-2147483648\b(?![.L])")
VECTOR_ACCESS = re.compile(r"\(thread \w+[234]\*\)\((\w+) ")

BARRIER = "mem_flags::mem_threadgroup"
ALIGNED = "alignas(16) "  # of the widest access, four floats
SAFE_MATH = """\
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#endif
"""


def cleaned(text: str, threads: int, exchanged: bool = False) -> str:
    """The source of one kernel, launched with `threads` threads in a threadgroup.

    exchanged: they hand values to each other through memory of the device. TargetError where the
    text is not as TVM 0.27 writes it.
    """
    kernels = KERNEL.findall(text)
    if len(kernels) != 1:
        raise TargetError(
            f"{len(kernels)} kernels were found in a text that TVM generated for one",
            cure="this is a fault of k3tvm, or another version of TVM is installed",
        )
    text = _hoisted(shown(text))
    text = LEAST_INT.sub("(-2147483647 - 1)", _aligned(text))
    if exchanged:
        text = text.replace(BARRIER, f"mem_flags::mem_device | {BARRIER}")
    head, kernel = text.split("kernel void ", 1)
    limit = f"[[max_total_threads_per_threadgroup({threads})]]\n"
    return f"{head}{SAFE_MATH}\n{limit}kernel void {kernel}"


def name_of(text: str) -> str:
    """The kernel's name."""
    match = KERNEL.search(text)
    return match[1] if match else ""


def _hoisted(text: str) -> str:
    """Threadgroup arrays at the top of the kernel. Their names are unique in it."""
    arrays = THREADGROUP.findall(text)
    lines = "".join(f"  {ALIGNED}{array}\n" for array in arrays)
    return KERNEL.sub(lambda m: m[0] + lines, THREADGROUP.sub("", text))


def _aligned(text: str) -> str:
    """Arrays of the thread that are accessed as vectors, aligned for that."""
    wide = set(VECTOR_ACCESS.findall(text))
    return ARRAY.sub(lambda m: m[1] + (ALIGNED if m[3] in wide else "") + m[2], text)
