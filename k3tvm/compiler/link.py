"""An executable becomes a file of the bundle: a shared library for Linux or macOS, objects for iOS.

A library for macOS is linked on any system with the linker of the PyPI package `ziglang`; TVM's
functions are found when it is loaded. For iOS there are no libraries to load: the file is a static
archive, which an app links and finds again with `ffi::SystemLib("")`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3tvm.errors import TargetError
from k3tvm.metal.zig import find_zig, run
from k3tvm.schedules.profile import OLDEST_MACOS, GpuProfile, Platform, TargetProfile

SUFFIXES: dict[Platform, str] = {"linux": ".so", "macos": ".dylib", "ios": ".a"}


def file_name(profile: TargetProfile, name: str) -> str:
    """The file for code called `name`, such as "cpu.so", "metal.dylib", "metal-ios.a"."""
    platform = platform_of(profile)
    if platform == "ios" and not name.endswith("ios"):
        name += "-ios"
    return name + SUFFIXES[platform]


def platform_of(profile: TargetProfile) -> Platform:
    """The system that a profile's host code is for."""
    return profile.platform if isinstance(profile, GpuProfile) else "linux"


def link(executable: Any, profile: TargetProfile, path: Path) -> None:
    """Write the code of an executable to `path`; TargetError with what the linker says."""
    linker = LINKERS.get(platform_of(profile))
    try:
        executable.export_library(str(path), **({"fcompile": linker} if linker else {}))
    except RuntimeError as error:
        raise TargetError(f"the library cannot be linked: {error}", cure="check g++") from None


@dataclass(frozen=True)
class Linker:
    """What `export_library` calls with the file to make and the objects to make it of.

    arguments: of zig, for a file.
    """

    arguments: Callable[[Path], list[str]]

    object_format = "o"  # TVM asks for it

    def __call__(self, output: str, objects: Sequence[str], **unused: Any) -> None:
        """Link; TargetError with what zig says.

        A signed library has its file's name in it, so it gets its final one from the beginning.
        """
        path = Path(output)
        with tempfile.TemporaryDirectory(prefix="k3tvm-") as folder:
            made = Path(folder, path.name.replace(".part.", "."))
            done = run(find_zig(), [*self.arguments(made), *objects])
            if done.returncode:
                raise TargetError(f"the library cannot be linked: zig says {done.stderr.strip()}")
            shutil.move(made, path)


def _dylib(path: Path) -> list[str]:
    """A library that is found next to whatever loads it."""
    arguments = ["build-lib", "-dynamic", "-target", f"aarch64-macos.{OLDEST_MACOS}"]
    arguments += ["-fallow-shlib-undefined", "-fno-compiler-rt", "-fno-ubsan-rt", "-lc"]
    return [*arguments, "-install_name", f"@rpath/{path.name}", f"-femit-bin={path}"]


def _archive(path: Path) -> list[str]:
    """Objects without dates and owners."""
    return ["ar", "--format=darwin", "rcsD", str(path)]


LINKERS: dict[Platform, Linker] = {"macos": Linker(_dylib), "ios": Linker(_archive)}
