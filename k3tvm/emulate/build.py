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
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsigned-char",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)
# Tell the scheduler of each access to memory: the hooks of a tool that is not linked
CHECKED = ("-fsanitize=thread", "-DK3EMU_CHECKED")
SMALL = 60_000  # characters of kernels that are not worth another process


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
    """The shared library of these kernels, from the cache if it is there."""
    files = [source(language, functions, group) for group in groups(kernels)]
    key = cache.key_of([*files, *flags, _headers(), version()])
    kept = cache.read(CACHE, key)
    if kept is None:
        kept = _compile(files, flags)
        cache.write(CACHE, key, kept)
    return kept


@cached
def _headers() -> str:
    return "\n".join(p.read_text() for p in sorted(INCLUDE.glob("*.h")))


@cached
def version() -> str:
    """What the compiler says of itself."""
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True)
    return f"{platform.machine()} {done.stdout.splitlines()[0] if done.stdout else ''}"


def groups(kernels: Sequence[Piece]) -> list[list[Piece]]:
    """Kernels in as many files as the machine has cores, of similar length."""
    count = min(os.cpu_count() or 1, 1 + sum(len(p.text) for p in kernels) // SMALL)
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for piece in sorted(kernels, key=lambda p: -len(p.text)):
        min(parts, key=lambda part: sum(len(p.text) for p in part)).append(piece)
    return parts


def _compile(files: Sequence[str], flags: Sequence[str]) -> bytes:
    command = [compiler(), *flags, f"-I{INCLUDE}"]
    with tempfile.TemporaryDirectory(prefix="k3tvm-emulate-") as folder:
        sources = [Path(folder) / f"kernels{i}.cc" for i in range(len(files))]
        for path, text in zip(sources, files, strict=True):
            path.write_text(text)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda s: _run([*command, "-c", str(s), "-o", f"{s}.o"]), sources))
        library = Path(folder) / "kernels.so"
        _run([compiler(), "-shared", "-o", str(library), *(f"{s}.o" for s in sources)])
        return library.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise TargetError(f"emulated kernels do not compile: {errors[0][:500]}")
