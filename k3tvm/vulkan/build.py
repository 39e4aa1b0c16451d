"""Turns the device functions of a module into a Vulkan module: TVM's `target.build.vulkan`."""

from __future__ import annotations

from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm.compiler import generation
from k3tvm.schedules.profile import GpuProfile
from k3tvm.vulkan import plugin
from k3tvm.vulkan.glsl.kernel import Shader, translate
from k3tvm.vulkan.glsl.types import UnsupportedError
from k3tvm.vulkan.limits import check_grid, check_kernel, profile_of
from k3tvm.vulkan.module import KernelInfo, write_module
from k3tvm.vulkan.spirv import compile_all, features
from k3tvm.vulkan.tools import find_tools


def check_tools(profile: GpuProfile) -> None:
    """Raise what is missing for compiling to Vulkan."""
    plugin.load()
    find_tools()


def register() -> None:
    """Let TVM compile for Vulkan with this generator."""
    plugin.load()
    generation.install("vulkan", build, UnsupportedError)


def build(module: Any, target: Any) -> Any:
    """An FFI module of the kernels in `module` (an IRModule of device functions).

    TargetError names the kernel that cannot be translated or exceeds the target's limits.
    """
    kernels = compile_kernels(module, generation.current().profile or profile_of(target))
    return tvm_ffi.get_global_func("k3tvm.vulkan.create_module")(write_module(kernels))


def compile_kernels(module: Any, profile: GpuProfile) -> list[KernelInfo]:
    """The kernels of an IRModule of device functions, checked against `profile`."""
    shaders = [translate(f, profile.push_bytes) for f in module.functions.values()]
    shaders.sort(key=lambda s: s.name)
    for shader in shaders:
        check_grid(shader.name, shader.grid, profile)
    work = generation.current()
    work.write({f"{s.name}.comp": s.source.encode() for s in shaders})
    spirv = compile_all({s.name: s.source for s in shaders})
    work.write({f"{name}.spv": data for name, data in spirv.items()})
    kernels = [_info(s, spirv[s.name]) for s in shaders]
    for kernel in kernels:
        check_kernel(kernel, profile)
    work.kernels.extend(kernels)
    return kernels


def _info(s: Shader, spirv: bytes) -> KernelInfo:
    needed = features(spirv, s.name)
    return KernelInfo(
        s.name, s.kinds, s.block, s.tags, s.local_size, s.shared_bytes, needed, s.source, spirv
    )
