"""Turns `native/*.cc` into the plug-in's shared library; needs g++ and the Vulkan headers.

Used when k3tvm is installed (setup.py) and by `k3tvm.vulkan.plugin.build`, so it imports nothing
but the standard library and the errors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from k3tvm.errors import DeviceError

NATIVE = Path(__file__).parent / "native"
LIBRARY = "libk3tvm_vulkan.so"
PACKAGES = ("apache-tvm", "apache-tvm-ffi")
WHERE = "the Vulkan plug-in"
# TVM's interfaces have parameters that are not used here, Vulkan's structures many fields.
QUIET = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", *QUIET)


def stamp() -> str:
    """Versions of TVM whose headers are installed; the plug-in works with no others."""
    try:
        return " ".join(f"{p}=={version(p)}" for p in PACKAGES)
    except PackageNotFoundError as error:
        raise DeviceError(
            f"cannot be built: {error.name} is not installed", where=WHERE, cure="pip install k3tvm"
        ) from error


def compile_plugin(output: Path) -> None:
    """Write the library to `output`, whole or not at all.

    DeviceError when a compiler or a header is missing, or a file does not compile.
    """
    compiler = os.environ.get("CXX") or "g++"
    if not shutil.which(compiler):
        raise _missing(f"there is no C++ compiler ({compiler})")
    flags = [*FLAGS, f'-DK3TVM_ABI="{stamp()}"', *(f"-I{p}" for p in includes())]
    _probe(compiler, flags)
    output.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the library, so that renaming replaces it in one step: processes
    # that have the old one loaded keep it.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".plugin-") as scratch:
        objects = _objects(compiler, flags, Path(scratch))
        made = Path(scratch) / LIBRARY
        _run([compiler, "-shared", "-o", str(made), *map(str, objects), *_libraries()])
        os.replace(made, output)


def _objects(compiler: str, flags: Sequence[str], scratch: Path) -> list[Path]:
    sources = sorted(NATIVE.glob("*.cc"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *flags, "-c", str(s), "-o", str(o)]
        for s, o in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    return objects


def folder(package: str) -> Path:
    """Where a package is installed; DeviceError if it is not. Does not import it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def includes() -> list[Path]:
    """Folders of the headers of TVM's runtime and its FFI."""
    tvm, ffi = folder("tvm"), folder("tvm_ffi")
    dlpack = next(ffi.rglob("dlpack/dlpack.h"), None)
    if dlpack is None:
        raise _missing("apache-tvm-ffi has no dlpack.h")
    return [tvm / "include", ffi / "include", dlpack.parent.parent]


def _libraries() -> list[str]:
    """Linked by name only: whoever loads the plug-in has loaded TVM's runtime before."""
    tvm, ffi = folder("tvm") / "lib", folder("tvm_ffi") / "lib"
    return [f"-L{tvm}", "-ltvm_runtime", f"-L{ffi}", "-ltvm_ffi", "-ldl", "-pthread"]


def _probe(compiler: str, flags: Sequence[str]) -> None:
    """Tell a missing Vulkan header from a fault in the sources."""
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", "-include", "vulkan/vulkan.h", "-"]
    if subprocess.run(command, input="", capture_output=True, text=True).returncode:
        raise _missing("there are no Vulkan headers (vulkan/vulkan.h)")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"does not compile: {done.stderr[:2000]}", where=WHERE)


def _missing(what: str) -> DeviceError:
    return DeviceError(
        f"cannot be built: {what}",
        where=WHERE,
        cure="on Debian and Ubuntu: apt install libvulkan-dev g++; then: k3tvm doctor --build",
    )
