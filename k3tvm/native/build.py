"""Turns a folder of C++ into a shared library against the headers in TVM's wheels; needs g++.

Used when k3tvm is installed (setup.py) and by `k3tvm doctor --build`, so it imports nothing but the
standard library and the errors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from k3tvm.errors import DeviceError

PACKAGES = ("apache-tvm", "apache-tvm-ffi")
# TVM's interfaces have parameters that are not used here, some structures many fields.
QUIET = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", *QUIET)


@dataclass(frozen=True)
class Sources:
    """What a library is made of.

    where: what errors call it. folder: all of its *.cc are compiled. packages: what to install on
    Debian. header: one that is not on every machine, and what errors call that.
    """

    where: str
    folder: Path
    packages: str = "g++"
    header: tuple[str, str] | None = None

    def missing(self, what: str) -> DeviceError:
        """The error for something that is not on this machine."""
        return DeviceError(
            f"cannot be built: {what}",
            where=self.where,
            cure=f"on Debian and Ubuntu: apt install {self.packages}; then: k3tvm doctor --build",
        )


def stamp(where: str = "a native library") -> str:
    """Versions of TVM whose headers are installed; what is built works with no others."""
    try:
        return " ".join(f"{p}=={version(p)}" for p in PACKAGES)
    except PackageNotFoundError as error:
        raise DeviceError(
            f"cannot be built: {error.name} is not installed", where=where, cure="pip install k3tvm"
        ) from error


def compile_library(sources: Sources, output: Path) -> None:
    """Write the library to `output`, whole or not at all.

    DeviceError when a compiler or a header is missing, or a file does not compile.
    """
    compiler = os.environ.get("CXX") or "g++"
    if not shutil.which(compiler):
        raise sources.missing(f"there is no C++ compiler ({compiler})")
    flags = [*FLAGS, f'-DK3TVM_ABI="{stamp(sources.where)}"', *(f"-I{p}" for p in includes())]
    _probe(sources, compiler, flags)
    output.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the library, so that renaming replaces it in one step: processes
    # that have the old one loaded keep it.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".plugin-") as scratch:
        objects = _objects(sources, compiler, flags, Path(scratch))
        made = Path(scratch) / output.name
        command = [compiler, "-shared", "-o", str(made), *map(str, objects), *_libraries()]
        _run(sources, command)
        os.replace(made, output)


def _objects(sources: Sources, compiler: str, flags: Sequence[str], scratch: Path) -> list[Path]:
    files = sorted(sources.folder.glob("*.cc"))
    objects = [scratch / f"{file.stem}.o" for file in files]
    commands = [
        [compiler, *flags, "-c", str(f), "-o", str(o)] for f, o in zip(files, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: _run(sources, command), commands))
    return objects


def folder(package: str) -> Path:
    """Where a package is installed; DeviceError if it is not. Does not import it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DeviceError("is not installed", where=package, cure="pip install k3tvm")
    return Path(spec.submodule_search_locations[0])


def includes() -> list[Path]:
    """Folders of the headers of TVM's runtime and its FFI."""
    tvm, ffi = folder("tvm"), folder("tvm_ffi")
    dlpack = next(ffi.rglob("dlpack/dlpack.h"), None)
    if dlpack is None:
        raise DeviceError("has no dlpack.h", where="apache-tvm-ffi", cure="install it again")
    return [tvm / "include", ffi / "include", dlpack.parent.parent]


def _libraries() -> list[str]:
    """Linked by name only: whoever loads the library has loaded TVM's runtime before."""
    tvm, ffi = folder("tvm") / "lib", folder("tvm_ffi") / "lib"
    return [f"-L{tvm}", "-ltvm_runtime", f"-L{ffi}", "-ltvm_ffi", "-ldl", "-pthread"]


def _probe(sources: Sources, compiler: str, flags: Sequence[str]) -> None:
    """Tell a missing header from a fault in the sources."""
    if sources.header is None:
        return
    header, name = sources.header
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", "-include", header, "-"]
    if subprocess.run(command, input="", capture_output=True, text=True).returncode:
        raise sources.missing(f"there are no {name} headers ({header})")


def _run(sources: Sources, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"does not compile: {done.stderr[:2000]}", where=sources.where)
