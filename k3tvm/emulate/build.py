"""TVM's CUDA or Metal text becomes a module whose kernels run on the CPU; needs g++."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache as cached
from pathlib import Path
from typing import Any

from k3tvm import native
from k3tvm._ffi import tvm_ffi
from k3tvm.compiler import cache
from k3tvm.compiler.launch import Launch
from k3tvm.emulate.module import write_module
from k3tvm.emulate.text import Language, Piece, pieces, source
from k3tvm.errors import TargetError

CACHE = "emulated"
CHECK = "K3TVM_EMULATE_CHECK"
INCLUDE = Path(__file__).parent / "include"
# Each operation as it stands, as on a device without fast mathematics; signs of characters as on
# x86-64 everywhere; any CPU of the kind
FLAGS = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsigned-char",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)
# Tell the scheduler of each access to memory: the hooks of a tool that is not linked
CHECKED = ("-fsanitize=thread", "-DK3EMU_CHECKED")


def check_tools() -> None:
    """TargetError without the compiler or the native library."""
    compiler()
    native.load()


def compiler() -> str:
    """The host's C++ compiler."""
    name = os.environ.get("CXX") or "g++"
    if not shutil.which(name):
        raise TargetError(
            f"there is no C++ compiler ({name}) to emulate kernels with",
            cure="install g++, or set CXX",
        )
    return name


def emulated_module(
    language: Language, text: str, kernels: Sequence[Launch], functions: str = ""
) -> Any:
    """The FFI module of the kernels in `text`; `functions` are device functions that they call.

    Where the environment says K3TVM_EMULATE_CHECK=1, every access to memory is checked: it must be
    inside of an array, and ordered with those of other threads. That takes ten times as long.
    """
    native.load()
    found = {p.name: p for p in pieces(language, text)}
    missing = [k.name for k in kernels if k.name not in found]
    if missing:
        raise TargetError(f"TVM's text has no kernel {missing[0]}", where=f"{language}-emulated")
    flags = FLAGS + CHECKED if os.environ.get(CHECK) == "1" else FLAGS
    library = compiled(language, functions, [found[k.name] for k in kernels], flags)
    blob = write_module(language, library, kernels)
    return tvm_ffi.get_global_func("k3tvm.emulate.create_module")(blob)


def compiled(
    language: Language, functions: str, kernels: Sequence[Piece], flags: Sequence[str] = FLAGS
) -> bytes:
    """The shared library of these kernels; those in the cache are not compiled again.

    Each is a file of its own, since models have many in common.
    """
    files = [source(language, functions, kernel) for kernel in kernels]
    keys = [cache.key_of([text, *flags, _headers(), version()]) for text in files]
    with tempfile.TemporaryDirectory(prefix="k3tvm-emulate-") as folder:

        def make(text: str, key: str) -> Path:
            path = Path(folder) / f"{key}.o"
            kept = cache.read(CACHE, key)
            if kept is None:
                kept = _compile(text, path, flags)
                cache.write(CACHE, key, kept)
            path.write_bytes(kept)
            return path

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(make, files, keys))
        return _link(objects, Path(folder) / "kernels.so")


@cached
def _headers() -> str:
    return "\n".join(p.read_text() for p in sorted(INCLUDE.glob("*.h")))


@cached
def version() -> str:
    """What the compiler says of itself."""
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True)
    return f"{platform.machine()} {done.stdout.splitlines()[0] if done.stdout else ''}"


def _compile(text: str, output: Path, flags: Sequence[str]) -> bytes:
    file = output.with_suffix(".cc")
    file.write_text(text)
    _run([compiler(), *flags, f"-I{INCLUDE}", "-c", str(file), "-o", str(output)])
    return output.read_bytes()


def _link(objects: Sequence[Path], output: Path) -> bytes:
    listed = output.with_suffix(".list")  # a command line has its limits
    listed.write_text("\n".join(f'"{path}"' for path in objects))
    _run([compiler(), "-shared", "-s", "-o", str(output), f"@{listed}"])
    return output.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise TargetError(f"emulated kernels do not compile: {errors[0][:500]}")
