"""Metal source becomes compiled libraries where Apple's own compiler is installed.

It comes with Xcode and runs on macOS only. A library compiled here starts sooner and keeps to IEEE
arithmetic; without it the source itself is shipped, and the Mac or iPhone compiles it on first use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k3tvm.errors import TargetError
from k3tvm.schedules.profile import Platform

SDKS: dict[Platform, str] = {"macos": "macosx", "ios": "iphoneos"}
# Metal 2.3 is the first with matrices of SIMD groups: macOS 11, iOS 14.
STANDARDS: dict[Platform, str] = {"macos": "macos-metal2.3", "ios": "ios-metal2.3"}
ARITHMETIC = ("-fno-fast-math", "-O2")


def compiler(platform: Platform) -> tuple[str, ...] | None:
    """The command of Apple's compiler for a platform; None where it is not installed."""
    xcrun = shutil.which("xcrun")
    if xcrun is None or platform not in SDKS:
        return None
    find = subprocess.run(
        [xcrun, "-sdk", SDKS[platform], "-find", "metal"], capture_output=True, check=False
    )
    return (xcrun, "-sdk", SDKS[platform], "metal") if find.returncode == 0 else None


def compile_all(
    command: Sequence[str], platform: Platform, texts: Mapping[str, str]
) -> dict[str, bytes]:
    """A library for each source by kernel name; TargetError with what the compiler says."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = pool.map(lambda item: _compile(command, platform, *item), texts.items())
        return dict(zip(texts, found, strict=True))


def _compile(command: Sequence[str], platform: Platform, name: str, text: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="k3tvm-") as folder:
        source, library = Path(folder, f"{name}.metal"), Path(folder, f"{name}.metallib")
        source.write_text(text)
        arguments = [f"-std={STANDARDS[platform]}", *ARITHMETIC, str(source), "-o", str(library)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode or not library.is_file():
            first = next((s for s in done.stderr.splitlines() if "error" in s), done.stderr.strip())
            raise TargetError(
                f"Apple's compiler says: {first}",
                where=f"kernel {name}",
                cure="this is a fault of k3tvm; compile with --dump DIR to see the Metal source",
            )
        return library.read_bytes()
