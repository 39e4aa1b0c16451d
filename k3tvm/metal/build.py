"""Turns the device functions of a module into Metal code: TVM's `target.build.metal`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm
from k3tvm.compiler.launch import check_launch, launch_of
from k3tvm.errors import TargetError
from k3tvm.metal import xcode
from k3tvm.metal.check import check_kernels
from k3tvm.metal.constants import hidden
from k3tvm.metal.kernel import MetalKernel
from k3tvm.metal.msl import cleaned, name_of
from k3tvm.metal.zig import available, find_zig
from k3tvm.schedules.profile import GpuProfile
from k3tvm.vulkan.glsl.usage import usage

GENERATOR, CALLBACK = "target.build.metal", "tvm_callback_metal_compile"

_dump: ContextVar[Path | None] = ContextVar("dump", default=None)
_profile: ContextVar[GpuProfile | None] = ContextVar("profile", default=None)
_kernels: ContextVar[list[MetalKernel] | None] = ContextVar("kernels", default=None)


def check_tools(profile: GpuProfile) -> None:
    """Raise what is missing for compiling to Metal: clang for the check, a linker for the Mac."""
    if not profile.emulated:
        find_zig()
        return
    from k3tvm.emulate import build as emulate

    emulate.check_tools()


def register() -> None:
    """Let TVM compile for Metal through this module; its errors keep their type on the way."""
    _generator()
    tvm_ffi.register_error(TargetError.__name__, TargetError)
    tvm_ffi.register_global_func(GENERATOR, build, override=True)


@cache
def _generator() -> Any:
    """TVM's own generator, found before ours takes its place."""
    return tvm.get_global_func(GENERATOR)


@contextmanager
def compiling_for(profile: GpuProfile, dump: Path | None = None) -> Iterator[list[MetalKernel]]:
    """Inside, code is generated for `profile`: compiled for its platform, or emulated.

    Yields a list that receives every kernel that was built. NAME.metal of each is written into the
    folder `dump`.
    """
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
    built: list[MetalKernel] = []
    tokens = _profile.set(profile), _kernels.set(built), _dump.set(dump)
    try:
        yield built
    finally:
        _profile.reset(tokens[0])
        _kernels.reset(tokens[1])
        _dump.reset(tokens[2])


def build(module: Any, target: Any) -> Any:
    """An FFI module of the kernels in `module` (an IRModule of device functions).

    TargetError names the kernel that exceeds the target's limits or that the check refuses.
    """
    profile = _profile.get()
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
    kernels = [MetalKernel(launches[n], texts[n], apple is not None) for n in sorted(texts)]
    _write_dump(kernels)
    if available() or not (profile and profile.emulated):
        check_kernels(texts)
    seen = _kernels.get()
    if seen is not None:
        seen.extend(kernels)
    if profile and profile.emulated:
        return _emulated(kernels)
    if profile is None or apple is None:
        return _generate(module, target, lambda text, _: [texts[name_of(text)], "metal"])
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
    before = tvm.get_global_func(CALLBACK, allow_missing=True)
    tvm_ffi.register_global_func(CALLBACK, compile_text, override=True)
    try:
        return _generator()(module, target)
    finally:
        if before is None:
            tvm_ffi.registry.remove_global_func(CALLBACK)
        else:
            tvm_ffi.register_global_func(CALLBACK, before, override=True)


def _emulated(kernels: list[MetalKernel]) -> Any:
    from k3tvm.emulate.build import emulated_module

    text = "\n".join(k.text for k in kernels)
    return emulated_module("metal", text, [k.launch for k in kernels])


def _write_dump(kernels: list[MetalKernel]) -> None:
    folder = _dump.get()
    if folder is None:
        return
    try:
        for kernel in kernels:
            (folder / f"{kernel.name}.metal").write_text(kernel.text)
    except OSError as error:  # TVM, which calls this, would make another error of it
        raise TargetError(f"cannot be written: {error}", where=f"dump {folder}") from None
