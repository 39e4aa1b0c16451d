"""Our native library: emulated devices, and modules that carry device code into a bundle."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from k3tvm.errors import DeviceError
from k3tvm.native.build import Sources, compile_library

WHERE = "the native library"
FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libk3tvm_native.so"


class EmulationError(DeviceError):
    """An emulated kernel did what a device would not survive, or was called wrongly."""


def build(output: Path = LIBRARY) -> Path:
    """Compile the library where `load` finds it; DeviceError without a compiler."""
    compile_library(Sources(WHERE, FOLDER), output)
    return output


@cache
def load() -> None:
    """Register the functions `k3tvm.artifact` and `k3tvm.emulate.*` with TVM.

    DeviceError when the library was not built, or is for another TVM.
    """
    from k3tvm._ffi import load_runtime, tvm_ffi
    from k3tvm.native import library

    load_runtime()
    library.check(LIBRARY, WHERE, "g++")
    tvm_ffi.error.register_error(EmulationError.__name__, EmulationError)
    library.load(LIBRARY, WHERE)
