"""Turns the device functions of a module into CUDA code: TVM's `target.build.cuda`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from k3tvm import native
from k3tvm._ffi import tvm_ffi
from k3tvm.compiler import generation
from k3tvm.compiler.generation import Generation
from k3tvm.compiler.launch import check_launch, launch_of
from k3tvm.cuda.device import device_functions
from k3tvm.cuda.kernel import CudaKernel, kernel_texts
from k3tvm.cuda.module import KIND, write_module
from k3tvm.cuda.nvcc import TEXT, Built, compile_all, fatbin_of
from k3tvm.cuda.spills import check_spills
from k3tvm.cuda.tools import find_toolkit
from k3tvm.schedules.profile import GpuProfile

CALLBACK = "tvm_callback_cuda_compile"


def check_tools(profile: GpuProfile) -> None:
    """Raise what is missing for compiling to CUDA: nvcc, or g++ for emulation."""
    if profile.emulated:
        from k3tvm.emulate import build as emulate

        emulate.check_tools()
    else:
        find_toolkit(profile.archs)
        native.load()


def register() -> None:
    """Let TVM compile for CUDA through this module."""
    generation.install("cuda", build)


def build(module: Any, target: Any) -> Any:
    """An FFI module of the kernels in `module` (an IRModule of device functions).

    TargetError names the kernel that exceeds the target's limits, what the compiler refuses, and
    hot kernels that spill registers.
    """
    work = generation.current()
    profile = work.profile or _profile_of(target)
    launches = [launch_of(f) for f in module.functions.values()]
    for launch in launches:
        check_launch(launch, profile)
    text = _text(module, target)
    texts = kernel_texts(text)
    launches.sort(key=lambda launch: launch.name)
    kernels = [CudaKernel(launch, texts[launch.name]) for launch in launches]
    functions = device_functions(text)
    work.write({TEXT: (functions + text).encode()})
    if profile.emulated:
        work.kernels.extend(kernels)
        return _emulated(text, functions, kernels)
    return _module(functions + text, kernels, profile, work)


def _module(text: str, kernels: Sequence[CudaKernel], profile: GpuProfile, work: Generation) -> Any:
    """A module of machine code, to be written into a library: here it cannot run."""
    toolkit = find_toolkit(profile.archs)
    built = compile_all(toolkit, text, profile.archs, work.progress)
    work.write({f"kernels.{b.arch}.{k}": d for b in built for k, d in _files(b).items()})
    kernels = [replace(k, resources=tuple(b.resources[k.name] for b in built)) for k in kernels]
    work.kernels.extend(kernels)
    check_spills((k.name, r) for k in kernels for r in k.resources)
    code = write_module([k.row() for k in kernels], fatbin_of(toolkit, built))
    native.load()
    return tvm_ffi.get_global_func("k3tvm.artifact")(KIND, code)


def _files(built: Built) -> dict[str, bytes]:
    return {"ptx": built.ptx, "cubin": built.cubin}


def _profile_of(target: Any) -> GpuProfile:
    """For who uses TVM without our compiler: the target's architecture, alone."""
    from k3tvm.compiler.targets.cuda import cuda_profile

    return cuda_profile(str(target.attrs.get("arch", "")))


def _text(module: Any, target: Any) -> str:
    """TVM's text of all kernels.

    Where TVM has its CUDA runtime, it would compile the text right away; it gets an empty answer.
    """
    with generation.replaced(CALLBACK, lambda text: b""):
        return str(generation.tvms_own("cuda")(module, target).inspect_source("cuda"))


def _emulated(text: str, functions: str, kernels: Sequence[CudaKernel]) -> Any:
    from k3tvm.emulate.build import emulated_module

    return emulated_module("cuda", text, [k.launch for k in kernels], functions)
