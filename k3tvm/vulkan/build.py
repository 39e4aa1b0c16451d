"""Turns the device functions of a module into a Vulkan module: TVM's `target.build.vulkan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm.errors import TargetError
from k3tvm.schedules.profile import GpuProfile
from k3tvm.vulkan import plugin
from k3tvm.vulkan.glsl.kernel import Shader, translate
from k3tvm.vulkan.glsl.types import UnsupportedError
from k3tvm.vulkan.limits import check_grid, check_kernel, profile_of
from k3tvm.vulkan.module import KernelInfo, write_module
from k3tvm.vulkan.spirv import compile_all, features
from k3tvm.vulkan.tools import find_tools

_dump: ContextVar[Path | None] = ContextVar("dump", default=None)
_profile: ContextVar[GpuProfile | None] = ContextVar("profile", default=None)
_kernels: ContextVar[list[KernelInfo] | None] = ContextVar("kernels", default=None)


def check_tools(profile: GpuProfile) -> None:
    """Raise what is missing for compiling to Vulkan."""
    plugin.load()
    find_tools()


def register() -> None:
    """Let TVM compile for Vulkan with this generator; its errors keep their type on the way."""
    plugin.load()
    for error in (TargetError, UnsupportedError):
        tvm_ffi.register_error(error.__name__, error)
    tvm_ffi.register_global_func("target.build.vulkan", build, override=True)


@contextmanager
def compiling_for(profile: GpuProfile, dump: Path | None = None) -> Iterator[list[KernelInfo]]:
    """Inside, kernels are checked against all of `profile`, not only what a TVM target can say.

    Yields a list that receives every kernel that was built. NAME.comp (GLSL) and NAME.spv of each
    are written into the folder `dump`.
    """
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
    built: list[KernelInfo] = []
    tokens = _profile.set(profile), _kernels.set(built), _dump.set(dump)
    try:
        yield built
    finally:
        _profile.reset(tokens[0])
        _kernels.reset(tokens[1])
        _dump.reset(tokens[2])


def build(module: Any, target: Any) -> Any:
    """An FFI module of the kernels in `module` (an IRModule of device functions).

    TargetError names the kernel that cannot be translated or exceeds the target's limits.
    """
    kernels = compile_kernels(module, _profile.get() or profile_of(target))
    return tvm_ffi.get_global_func("k3tvm.vulkan.create_module")(write_module(kernels))


def compile_kernels(module: Any, profile: GpuProfile) -> list[KernelInfo]:
    """The kernels of an IRModule of device functions, checked against `profile`."""
    shaders = [translate(f, profile.push_bytes) for f in module.functions.values()]
    shaders.sort(key=lambda s: s.name)
    for shader in shaders:
        check_grid(shader.name, shader.grid, profile)
    _write_dump({f"{s.name}.comp": s.source.encode() for s in shaders})
    spirv = compile_all({s.name: s.source for s in shaders})
    _write_dump({f"{name}.spv": data for name, data in spirv.items()})
    kernels = [_info(s, spirv[s.name]) for s in shaders]
    for kernel in kernels:
        check_kernel(kernel, profile)
    seen = _kernels.get()
    if seen is not None:
        seen.extend(kernels)
    return kernels


def _info(s: Shader, spirv: bytes) -> KernelInfo:
    needed = features(spirv, s.name)
    return KernelInfo(
        s.name, s.kinds, s.block, s.tags, s.local_size, s.shared_bytes, needed, s.source, spirv
    )


def _write_dump(files: dict[str, bytes]) -> None:
    directory = _dump.get()
    if directory is None:
        return
    try:
        for name, data in files.items():
            (directory / name).write_bytes(data)
    except OSError as error:  # TVM, which calls this, would make another error of it
        raise TargetError(f"cannot be written: {error}", where=f"dump {directory}") from None
