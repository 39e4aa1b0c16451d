"""Turns the device functions of a module into CUDA code: TVM's `target.build.cuda`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from k3tvm import native
from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm
from k3tvm.compiler.launch import check_launch, launch_of
from k3tvm.cuda.device import device_functions
from k3tvm.cuda.kernel import CudaKernel, kernel_texts
from k3tvm.cuda.module import KIND, write_module
from k3tvm.cuda.nvcc import TEXT, Built, compile_all, fatbin_of
from k3tvm.cuda.spills import check_spills
from k3tvm.cuda.tools import find_toolkit
from k3tvm.errors import TargetError
from k3tvm.schedules.profile import GpuProfile

GENERATOR, CALLBACK = "target.build.cuda", "tvm_callback_cuda_compile"

_dump: ContextVar[Path | None] = ContextVar("dump", default=None)
_profile: ContextVar[GpuProfile | None] = ContextVar("profile", default=None)
_kernels: ContextVar[list[CudaKernel] | None] = ContextVar("kernels", default=None)
_progress: ContextVar[Callable[[str], None]] = ContextVar("progress", default=lambda _: None)


def check_tools(profile: GpuProfile) -> None:
    """Raise what is missing for compiling to CUDA: nvcc, or g++ for emulation."""
    if profile.emulated:
        from k3tvm.emulate import build as emulate

        emulate.check_tools()
    else:
        find_toolkit(profile.archs)
        native.load()


def register() -> None:
    """Let TVM compile for CUDA through this module; its errors keep their type on the way."""
    _generator()
    tvm_ffi.register_error(TargetError.__name__, TargetError)
    tvm_ffi.register_global_func(GENERATOR, build, override=True)


@cache
def _generator() -> Any:
    """TVM's own generator, found before ours takes its place."""
    return tvm.get_global_func(GENERATOR)


@contextmanager
def reporting(progress: Callable[[str], None]) -> Iterator[None]:
    """Inside, `progress` is told when an architecture is finished, from several threads."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


@contextmanager
def compiling_for(profile: GpuProfile, dump: Path | None = None) -> Iterator[list[CudaKernel]]:
    """Inside, code is generated for the architectures of `profile`, or emulated.

    Yields a list that receives every kernel that was built. The text of all kernels and, for each
    architecture, PTX and machine code are written into the folder `dump`.
    """
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
    built: list[CudaKernel] = []
    tokens = _profile.set(profile), _kernels.set(built), _dump.set(dump)
    try:
        yield built
    finally:
        _profile.reset(tokens[0])
        _kernels.reset(tokens[1])
        _dump.reset(tokens[2])


def build(module: Any, target: Any) -> Any:
    """An FFI module of the kernels in `module` (an IRModule of device functions).

    TargetError names the kernel that exceeds the target's limits, what the compiler refuses, and
    hot kernels that spill registers.
    """
    profile = _profile.get() or _profile_of(target)
    launches = [launch_of(f) for f in module.functions.values()]
    for launch in launches:
        check_launch(launch, profile)
    text = _text(module, target)
    texts = kernel_texts(text)
    launches.sort(key=lambda launch: launch.name)
    kernels = [CudaKernel(launch, texts[launch.name]) for launch in launches]
    functions = device_functions(text)
    _write_dump({TEXT: (functions + text).encode()})
    if profile.emulated:
        _note(kernels)
        return _emulated(text, functions, kernels)
    return _module(functions + text, kernels, profile)


def _module(text: str, kernels: Sequence[CudaKernel], profile: GpuProfile) -> Any:
    """A module of machine code, to be written into a library: here it cannot run."""
    toolkit = find_toolkit(profile.archs)
    built = compile_all(toolkit, text, profile.archs, _progress.get())
    _write_dump({f"kernels.{b.arch}.{k}": d for b in built for k, d in _files(b).items()})
    kernels = [replace(k, resources=tuple(b.resources[k.name] for b in built)) for k in kernels]
    _note(kernels)
    check_spills((k.name, r) for k in kernels for r in k.resources)
    code = write_module([k.row() for k in kernels], fatbin_of(toolkit, built))
    native.load()
    return tvm_ffi.get_global_func("k3tvm.artifact")(KIND, code)


def _files(built: Built) -> dict[str, bytes]:
    return {"ptx": built.ptx, "cubin": built.cubin}


def _note(kernels: Sequence[CudaKernel]) -> None:
    seen = _kernels.get()
    if seen is not None:
        seen.extend(kernels)


def _profile_of(target: Any) -> GpuProfile:
    """For who uses TVM without our compiler: the target's architecture, alone."""
    from k3tvm.compiler.targets.cuda import cuda_profile

    return cuda_profile(str(target.attrs.get("arch", "")))


def _text(module: Any, target: Any) -> str:
    """TVM's text of all kernels.

    Where TVM has its CUDA runtime, it would compile the text right away; it gets an empty answer.
    """
    before = tvm.get_global_func(CALLBACK, allow_missing=True)
    tvm_ffi.register_global_func(CALLBACK, lambda text: b"", override=True)
    try:
        return str(_generator()(module, target).inspect_source("cuda"))
    finally:
        if before is None:
            tvm_ffi.registry.remove_global_func(CALLBACK)
        else:
            tvm_ffi.register_global_func(CALLBACK, before, override=True)


def _emulated(text: str, functions: str, kernels: Sequence[CudaKernel]) -> Any:
    from k3tvm.emulate.build import emulated_module

    return emulated_module("cuda", text, [k.launch for k in kernels], functions)


def _write_dump(files: dict[str, bytes]) -> None:
    folder = _dump.get()
    if folder is None:
        return
    try:
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:  # TVM, which calls this, would make another error of it
        raise TargetError(f"cannot be written: {error}", where=f"dump {folder}") from None
