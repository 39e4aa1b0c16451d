"""TVM's runtime without its compiler: the FFI core and one small library, loaded without torch.

`import tvm` brings the compiler, 170 MB and a second of start-up; a bundle needs neither. tvm_ffi
imports torch when it finds it, which costs seconds more: while it loads, torch is hidden, unless
somebody imported it before. Later versions of tvm_ffi crash inside TVM 0.27, so both packages are
pinned, and the pins are checked here.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from k3tvm.errors import TargetError

PINS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


def check_pins() -> None:
    """Raise TargetError unless exactly the pinned TVM packages are installed."""
    for package, wanted in PINS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise TargetError(
                f"found {found}, k3tvm needs exactly {wanted}",
                where=package,
                cure=f"run: pip install {package}=={wanted}",
            )


@contextmanager
def without_torch() -> Iterator[None]:
    """Let imports inside find no torch, unless it is loaded already."""
    modules: dict[str, Any] = sys.modules  # None in it means: do not look for this module
    hide = "torch" not in modules
    if hide:
        modules["torch"] = None
    try:
        yield
    finally:
        if hide:
            del modules["torch"]


check_pins()
with without_torch():
    import tvm_ffi


@cache
def load_runtime() -> None:
    """Load libtvm_runtime, which brings the virtual machine and the thread pool."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        raise TargetError("is not installed", where="apache-tvm", cure="pip install k3tvm")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    library = Path(spec.submodule_search_locations[0]) / "lib" / f"libtvm_runtime.{suffix}"
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


__all__ = ["PINS", "check_pins", "load_runtime", "tvm_ffi", "without_torch"]
