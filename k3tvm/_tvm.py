"""Imports TVM once, without torch: the one place where the compiler and the runtime take it from.

`tvm_ffi` imports torch when it finds it, which costs seconds and hundreds of megabytes that neither
the compiler nor the runtime needs. While TVM loads, torch is hidden, unless somebody imported it
before. The versions are pinned (later ffi versions crash inside TVM) and checked here.
"""

from __future__ import annotations

import importlib.metadata
import sys

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


check_pins()

_absent = object()
_torch = sys.modules.get("torch", _absent)
if _torch is _absent:
    sys.modules["torch"] = None  # type: ignore[assignment]
try:
    import tvm
    from tvm import relax
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script import builder as T
finally:
    if _torch is _absent:
        del sys.modules["torch"]

__all__ = ["PINS", "IRBuilder", "T", "check_pins", "relax", "tvm"]
