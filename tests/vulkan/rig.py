"""A Vulkan device without TVM's compiler: tensors, kernels written in GLSL, and the counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from k3tvm._ffi import tvm_ffi
from k3tvm.runtime.device_memory import VULKAN, DeviceMemory
from k3tvm.vulkan import plugin
from k3tvm.vulkan.module import KernelInfo, write_module
from k3tvm.vulkan.spirv import compile_one, features

ROOT = Path(__file__).resolve().parents[2]
THREADS = 64
HEAD = """#version 460
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
layout(local_size_x = 64) in;
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer U { uint d[]; };
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer D { double d[]; };
"""
# Prints what a user would be told.
TOLD = """
import sys
from k3tvm.errors import DeviceError
try:
    {0}
except DeviceError as error:
    sys.stdout.write(f"{{type(error).__name__}}: {{error}}")
"""
USE = "import numpy as np; from tests.vulkan.rig import mix, rig, spin, function\n"
PUT = USE + "    rig({0}).memory.put(np.zeros(64, 'uint32'))"
PUSHED = "layout(push_constant, scalar) uniform Arguments {{ {0} }};\n"
BLOCK = (
    "layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer A {{ {0} }};\n"
    "layout(push_constant, scalar) uniform Arguments {{ A a; }};\n"
)


def kernel(name: str, kinds: str, members: str, body: str, block: bool = False) -> KernelInfo:
    """A kernel over one dimension; `i` is the thread. In a block, arguments are called a.NAME."""
    head = HEAD + (BLOCK if block else PUSHED).format(members)
    source = head + f"void main() {{ uint i = gl_GlobalInvocationID.x;\n{body}\n}}\n"
    code = compile_one(source, name)
    needs = features(code, name)
    return KernelInfo(name, kinds, block, (0, 3), (THREADS, 1, 1), 0, needs, source, code)


@cache
def mix() -> KernelInfo:
    """y[i] = 3 y[i] + x[i] + k for i below n; exact in uint32."""
    return kernel(
        "mix", "pPIi", "U x; U y; uint k; int n;", "if (i < n) y.d[i] = 3 * y.d[i] + x.d[i] + k;"
    )


@cache
def spin() -> KernelInfo:
    """Like `mix`, n times over for every element: keeps the device busy."""
    body = "uint v = x.d[i]; for (int t = 0; t < n; ++t) v = 3 * v + k; y.d[i] = v;"
    return kernel("spin", "pPIi", "U x; U y; uint k; int n;", body)


@dataclass(frozen=True)
class Rig:
    """Device `index` and what can be done with it."""

    index: int
    memory: DeviceMemory

    def call(self, info: KernelInfo) -> Any:
        """The kernel as a function of its parameters and the grid's extents."""
        return load_kernel(info)

    def run(self, info: KernelInfo, x: Any, y: Any, k: int, n: int) -> None:
        """Launch `mix` or `spin` over n elements of tensors."""
        self.call(info)(x, y, k, n, -(-int(np.prod(y.shape)) // THREADS), THREADS)

    def stats(self) -> dict[str, int]:
        """The device's counters."""
        return dict(json.loads(function("stats")(self.index)))

    def sync(self) -> None:
        """Wait until everything is finished."""
        tvm_ffi.get_global_func("runtime.Device_StreamSync")(self.memory.device, 0)


def function(name: str) -> Any:
    """A function of the plug-in."""
    return tvm_ffi.get_global_func(f"k3tvm.vulkan.{name}")


@cache
def rig(index: int = 0) -> Rig:
    """The device, with the plug-in loaded."""
    plugin.load()
    return Rig(index, DeviceMemory(VULKAN, index, "k3tvm.vulkan"))


@cache
def load_kernel(info: KernelInfo) -> Any:
    """The kernel as a function, from a module of its own."""
    return function("create_module")(write_module([info]))[info.name]


def changed(info: KernelInfo, **fields: Any) -> KernelInfo:
    """The same kernel with other claims about itself."""
    return replace(info, **fields)


def in_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with tests and package to be imported."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=environment.pop("cwd", str(ROOT)),
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What a process wrote, on one line; it must have ended well."""
    assert done.returncode == 0, done.stderr
    assert "\n" not in done.stdout
    return done.stdout
