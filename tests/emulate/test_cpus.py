"""The scheduler by itself, on this CPU and, where there is a compiler and qemu, on AArch64."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from k3tvm.emulate.build import INCLUDE
from k3tvm.native import FOLDER

SOURCE = Path(__file__).parents[1] / "native" / "emulate_block.cc"
PARTS = ("block.cc", "fiber.cc", "races.cc", "shared_memory.cc")
CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"


def build(compiler: str, level: str, output: Path) -> None:
    """The program for another CPU needs nothing of that CPU's system: it is linked statically."""
    files = [str(SOURCE), *(str(FOLDER / part) for part in PARTS)]
    flags = ["-std=c++17", level, "-static", "-pthread", f"-I{FOLDER}", f"-I{INCLUDE}"]
    done = subprocess.run(
        [compiler, *flags, *files, "-o", str(output)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", ["-O0", "-O2"])
@pytest.mark.parametrize("cpu", ["this", "aarch64"])
def test_threads_keep_their_registers_and_wait_for_each_other(
    cpu: str, level: str, tmp_path: Path
) -> None:
    compiler, runner = os.environ.get("CXX") or "g++", []
    if cpu == "aarch64" and platform.machine() != "aarch64":
        if not (shutil.which(CROSS) and shutil.which(QEMU)):
            reason = f"needs {CROSS} and {QEMU}: apt install g++-aarch64-linux-gnu qemu-user"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
        compiler, runner = CROSS, [QEMU]
    program = tmp_path / "program"
    build(compiler, level, program)
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "" and done.returncode == 0, done.stderr
