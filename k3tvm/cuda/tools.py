"""Finds NVIDIA's compiler, from the system or from PyPI, and asks it what it knows."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k3tvm.errors import TargetError

WHERE = "CUDA compiler"
CURE = "pip install 'k3tvm[cuda]', or set K3TVM_NVCC to the nvcc of a CUDA toolkit"
OLDEST = (12, 8)  # the first that knows sm_120
PROGRAMS = ("ptxas", "fatbinary")  # beside nvcc


@dataclass(frozen=True)
class Toolkit:
    """nvcc and its companions: their folder, version, and the architectures that they know.

    stamp: everything about the programs that decides about their results.
    """

    folder: Path
    version: tuple[int, ...]
    stamp: str
    archs: frozenset[str]

    def run(
        self, program: str, arguments: Sequence[str], folder: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in `folder` to the end and keep what it says."""
        return _run([str(self.folder / program), *arguments], folder)

    def knows(self, arch: str) -> bool:
        """Whether code can be made for "sm_90a": lists name only the architecture, "sm_90"."""
        return arch.rstrip("af") in self.archs


def find_toolkit(archs: Sequence[str] = ()) -> Toolkit:
    """The first toolkit that knows all of `archs`.

    $K3TVM_NVCC decides alone; then come $CUDA_HOME, PATH, and the packages of PyPI. TargetError
    says what was found and why it does not do, or that g++ is missing, which nvcc calls.
    """
    if shutil.which("g++") is None:
        raise TargetError("no g++ is found, which nvcc needs", where=WHERE, cure="install g++")
    reasons = []
    for nvcc in _candidates():
        found = _toolkit(nvcc)
        if isinstance(found, Toolkit):
            unknown = [a for a in archs if not found.knows(a)]
            if not unknown:
                return found
            found = f"{nvcc} does not know {', '.join(unknown)}"
        reasons.append(found)
    raise TargetError("; ".join(reasons) or "was not found", where=WHERE, cure=CURE)


def tools() -> dict[str, str]:
    """What was found, for people: program -> version and path, or the reason why not."""
    try:
        found = find_toolkit()
    except TargetError as error:
        return {"nvcc": str(error)}
    return {"nvcc": f"{'.'.join(map(str, found.version))} ({found.folder / 'nvcc'})"}


@cache
def _toolkit(nvcc: Path) -> Toolkit | str:
    """The toolkit of an nvcc, or why it cannot be used."""
    lacking = [p for p in PROGRAMS if not (nvcc.parent / p).exists()]
    if lacking:
        return f"{nvcc} has no {' and no '.join(lacking)} beside it"
    try:
        said = _run([str(nvcc), "--version"]).stdout
        listed = _run([str(nvcc), "--list-gpu-code"]).stdout
    except OSError as error:  # of another machine, damaged, not to be executed
        return f"{nvcc} cannot be run ({error.strerror})"
    match = re.search(r"release (\d+)\.(\d+), (V[\d.]+)", said)
    if match is None:
        return f"{nvcc} does not tell its version"
    version = int(match[1]), int(match[2])
    if version < OLDEST:
        return f"{nvcc} has version {match[1]}.{match[2]}, too old"
    return Toolkit(nvcc.parent, version, match[3], frozenset(listed.split()))


def _candidates() -> Iterator[Path]:
    chosen = os.environ.get("K3TVM_NVCC")
    if chosen:
        yield Path(chosen)
        return
    home = os.environ.get("CUDA_HOME")
    if home:
        yield Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    for folder in package_folders():
        if (folder / "bin" / "nvcc").exists():
            yield folder / "bin" / "nvcc"


def package_folders() -> list[Path]:
    """Where NVIDIA's packages of PyPI put the files of a toolkit, the newest version first."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [folder for root in roots for folder in Path(root).glob("cu[0-9]*")]
    return sorted(found, key=lambda folder: int(folder.name[2:]), reverse=True)


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
