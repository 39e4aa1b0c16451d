"""CUDA text becomes a fat binary: machine code for each architecture, PTX for those to come.

Each architecture is one run of nvcc to PTX and one of ptxas to machine code, of all kernels of a
model together; architectures are compiled side by side. Where kernels spill registers, ptxas runs
once more, with more room for them. The results are kept by the hash of text,
flags and tools.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from k3tvm.compiler import cache
from k3tvm.cuda import ptxas
from k3tvm.cuda.ptxas import Resources
from k3tvm.cuda.room import ROOM, with_room
from k3tvm.cuda.tools import CURE, Toolkit
from k3tvm.errors import TargetError

KIND = "cuda"  # the part of the cache
# As IEEE 754 has it, but for a * b + c in one rounding; nothing else that fast-math stands for.
FLAGS = ["-std=c++17", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-fmad=true", "-w"]
PTXAS_FLAGS = ["-O3", "-v"]
# LZ4, which `fatbin.py` can undo and which every driver of CUDA 12 and newer knows
PACKING = "--compress-mode=speed"
TEXT, PTX, CUBIN, FATBIN = "kernels.cu", "kernels.ptx", "kernels.cubin", "kernels.fatbin"


@dataclass(frozen=True)
class Built:
    """What one architecture gets, and what ptxas said of each kernel."""

    arch: str
    ptx: bytes
    cubin: bytes
    resources: dict[str, Resources]


def compile_all(
    toolkit: Toolkit,
    text: str,
    archs: Sequence[str],
    progress: Callable[[str], None] = lambda message: None,
) -> list[Built]:
    """Compile the text for all architectures, several at a time; results in their order.

    TargetError with the compiler's first complaint, or when there is no room for its files.
    """

    def one(arch: str) -> Built:
        built = _cached(toolkit, text, arch)
        progress(f"compiled for {arch}")
        return built

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        try:
            return list(pool.map(one, archs))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        except OSError as error:
            raise TargetError(
                f"cannot be written: {error}",
                where=f"temporary files of the CUDA compiler in {tempfile.gettempdir()}",
                cure="make room there, or set TMPDIR",
            ) from None


def fatbin_of(toolkit: Toolkit, built: Sequence[Built]) -> bytes:
    """One fat binary of all machine code, and of the PTX of the newest architecture."""
    newest = max(built, key=lambda b: _number(b.arch))
    with tempfile.TemporaryDirectory(prefix="k3tvm-") as name:
        folder, pictures = Path(name), []
        for b in built:
            (folder / f"{b.arch}.cubin").write_bytes(b.cubin)
            pictures.append(f"--image3=kind=elf,sm={b.arch[3:]},file={b.arch}.cubin")
        (folder / PTX).write_bytes(newest.ptx)
        pictures.append(f"--image3=kind=ptx,sm={_number(newest.arch)},file={PTX}")
        _must(toolkit, "fatbinary", ["-64", PACKING, f"--create={FATBIN}", *pictures], folder)
        return (folder / FATBIN).read_bytes()


def _cached(toolkit: Toolkit, text: str, arch: str) -> Built:
    key = cache.key_of([text, arch, toolkit.stamp, repr(FLAGS), repr(PTXAS_FLAGS), ROOM])
    parts = {name: cache.read(KIND, f"{key}.{name}") for name in ("ptx", "cubin", "log")}
    found = {name: data for name, data in parts.items() if data is not None}
    if len(found) < len(parts):
        found = _compile(toolkit, text, arch)
        for name, data in found.items():
            cache.write(KIND, f"{key}.{name}", data)
    return Built(arch, found["ptx"], found["cubin"], _resources(found, arch))


def _resources(found: Mapping[str, bytes], arch: str) -> dict[str, Resources]:
    try:
        return ptxas.resources(found["log"].decode())
    except ValueError as error:
        raise TargetError(str(error), where=f"CUDA compiler for {arch}") from None


def _compile(toolkit: Toolkit, text: str, arch: str) -> dict[str, bytes]:
    """PTX, machine code, and what ptxas says; file names are fixed, for they leave traces."""
    with tempfile.TemporaryDirectory(prefix="k3tvm-") as name:
        folder = Path(name)
        (folder / TEXT).write_text(text)
        # nothing in it is for one architecture alone, so that later GPUs can take it
        front = [*FLAGS, "-ptx", f"-arch=compute_{_number(arch)}", TEXT, "-o", PTX]
        _must(toolkit, "nvcc", front, folder)
        first = _assemble(toolkit, folder, arch)
        spilled = {n: r.spill_bytes for n, r in _resources(first, arch).items() if r.spill_bytes}
        if not spilled:
            return first
        (folder / PTX).write_text(with_room(first["ptx"].decode(), spilled))
        second = _assemble(toolkit, folder, arch)
        after = _resources(second, arch)
        return second if all(after[n].spill_bytes <= b for n, b in spilled.items()) else first


def _assemble(toolkit: Toolkit, folder: Path, arch: str) -> dict[str, bytes]:
    """Machine code of the PTX in a folder."""
    back = [*PTXAS_FLAGS, f"-arch={arch}", PTX, "-o", CUBIN]
    done = _must(toolkit, "ptxas", back, folder)
    ptx, cubin = (folder / PTX).read_bytes(), (folder / CUBIN).read_bytes()
    return {"ptx": ptx, "cubin": cubin, "log": (done.stdout + done.stderr).encode()}


def _must(
    toolkit: Toolkit, program: str, arguments: Sequence[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a program; TargetError with the line in which it complains."""
    done = toolkit.run(program, arguments, folder)
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines() or ["nothing"]
        complaint = next((line for line in said if "error" in line or "fatal" in line), said[0])
        where = next((a for a in arguments if a.startswith("-arch=")), program)
        raise TargetError(
            f"{program} says: {complaint}",
            where=f"CUDA code ({where})",
            cure=CURE if "No such file" in complaint else "",
        )
    return done


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))
