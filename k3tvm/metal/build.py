"""Turns the device functions of a module into Metal code: TVM's `target.build.metal`."""

from __future__ import annotations

from typing import Any

from k3tvm.compiler import generation
from k3tvm.compiler.launch import check_launch, launch_of
from k3tvm.metal import xcode
from k3tvm.metal.check import check_kernels
from k3tvm.metal.constants import hidden
from k3tvm.metal.kernel import MetalKernel
from k3tvm.metal.msl import cleaned, name_of
from k3tvm.metal.zig import available, find_zig
from k3tvm.schedules.profile import GpuProfile
from k3tvm.vulkan.glsl.usage import usage

CALLBACK = "tvm_callback_metal_compile"


def check_tools(profile: GpuProfile) -> None:
    """Raise what is missing for compiling to Metal: clang for the check, a linker for the Mac."""
    if not profile.emulated:
        find_zig()
        return
    from k3tvm.emulate import build as emulate

    emulate.check_tools()


def register() -> None:
    """Let TVM compile for Metal through this module."""
    generation.install("metal", build)


def build(module: Any, target: Any) -> Any:
    """An FFI module of the kernels in `module` (an IRModule of device functions).

    TargetError names the kernel that exceeds the target's limits or that the check refuses.
    """
    work = generation.current()
    profile = work.profile
    launches = {str(f.attrs["global_symbol"]): launch_of(f) for f in module.functions.values()}
    if profile:
        for launch in launches.values():
            check_launch(launch, profile)
    exchanged = {
        str(f.attrs["global_symbol"]): usage(f).exchanged for f in module.functions.values()
    }
    module = hidden(module)
    texts = {
        name: cleaned(text, launches[name].total_threads, bool(exchanged[name]))
        for name, text in _texts(module, target).items()
    }
    apple = xcode.compiler(profile.platform) if profile else None
    kernels = [MetalKernel(launches[n], texts[n]) for n in sorted(texts)]
    work.write({f"{k.name}.metal": k.text.encode() for k in kernels})
    if available() or not (profile and profile.emulated):
        check_kernels(texts)
    work.kernels.extend(kernels)
    if profile and profile.emulated:
        return _emulated(kernels)
    if profile is None or apple is None:
        return _generate(module, target, lambda text, _: [texts[name_of(text)], "metal"])
    work.progress("compiling Metal libraries with Apple's compiler")
    libraries = xcode.compile_all(apple, profile.platform, texts)
    return _generate(module, target, lambda text, _: [libraries[name_of(text)], "metallib"])


def _texts(module: Any, target: Any) -> dict[str, str]:
    """TVM's source by kernel name."""
    texts: dict[str, str] = {}

    def keep(text: str, target: Any) -> list[str]:
        texts[name_of(text)] = text
        return [text, "metal"]

    _generate(module, target, keep)
    return texts


def _generate(module: Any, target: Any, compile_text: Any) -> Any:
    """Run TVM's generator; it asks `compile_text` what to put in the place of each source."""
    with generation.replaced(CALLBACK, compile_text):
        return generation.tvms_own("metal")(module, target)


def _emulated(kernels: list[MetalKernel]) -> Any:
    from k3tvm.emulate.build import emulated_module

    text = "\n".join(k.text for k in kernels)
    return emulated_module("metal", text, [k.launch for k in kernels])
