"""Finds the PyPI package `ziglang`: clang for checks, a linker for Apple's systems."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from k3tvm.errors import TargetError

CURE = "pip install 'k3tvm[metal]'"
OLDEST = (0, 17)  # the first that was tried


@cache
def find_zig() -> Path:
    """The program of the package; TargetError when it is missing or too old."""
    spec = importlib.util.find_spec("ziglang")
    places = list(spec.submodule_search_locations or ()) if spec else []
    program = Path(places[0], "zig") if places else None
    if program is None or not program.is_file():
        raise TargetError("the Python package ziglang is not installed", where="zig", cure=CURE)
    version = run(program, ["version"]).stdout.strip()
    numbers = tuple(int(n) for n in version.split("-")[0].split(".")[:2] if n.isdigit())
    if numbers < OLDEST:
        raise TargetError(f"version {version or 'unknown'} is too old", where="zig", cure=CURE)
    return program


@cache
def version() -> str:
    """What the program says."""
    return run(find_zig(), ["version"]).stdout.strip()


def tools() -> dict[str, str]:
    """What was found, for people: program -> version and path, or the reason why not."""
    try:
        return {"zig": f"{version()} ({find_zig()})"}
    except TargetError as error:
        return {"zig": str(error)}


def available() -> bool:
    """Whether there is one that can be used."""
    try:
        find_zig()
    except TargetError:
        return False
    return True


def run(
    program: Path, arguments: Sequence[str], folder: Path | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run to the end in `folder` with `text` as its input, and keep what it says."""
    command = [str(program), *arguments]
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, cwd=folder
        )
    except OSError as error:
        raise TargetError(
            f"cannot be run: {error.strerror}", where=str(program), cure=CURE
        ) from None
