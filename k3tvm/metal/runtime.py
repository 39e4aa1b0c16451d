"""Apple's GPUs of this machine through TVM's Metal runtime, which is in TVM's wheel for macOS.

TVM's runtime copies between tensors; filling and copying parts of one are put together from that.
No Mac has run this yet.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from k3tvm._ffi import load_runtime, tvm_ffi
from k3tvm.errors import DeviceError

METAL = 8  # DLPack's number of the device type
PREFIX = "k3tvm.metal"
RUNTIME = "libtvm_runtime_metal.dylib"
EXISTS, TOTAL_MEMORY = 0, 14  # TVM's numbers of what a device says about itself
PIECE = 1 << 24  # bytes that are filled at once


def find(selector: str = "") -> int:
    """The number of the device; DeviceError on other systems, and when there is no such device."""
    load()
    index = int(selector) if selector.isdecimal() else 0 if not selector else -1
    ask = tvm_ffi.get_global_func("runtime.GetDeviceAttr")
    if index < 0 or not ask(METAL, index, EXISTS):
        raise DeviceError(f"device metal:{selector}: there is none of that number")
    return index


@cache
def load() -> None:
    """Give TVM's runtime its Metal devices, and register `k3tvm.metal.{fill,copy,stats}`."""
    if sys.platform != "darwin":
        raise DeviceError(
            f"device metal: this system is {sys.platform}, Metal is part of macOS",
            cure="run the bundle on a Mac, or use --device metal-emulated with a bundle for that",
        )
    load_runtime()
    if tvm_ffi.get_global_func("ffi.Module.load_from_bytes.metal", allow_missing=True) is None:
        _load_library()
    register()


def register() -> None:
    """Make the functions known that `DeviceMemory` asks for."""
    for function in (fill, copy, stats):
        tvm_ffi.register_global_func(f"{PREFIX}.{function.__name__}", function, override=True)


def fill(tensor: Any, offset: int, size: int, value: int) -> None:
    """Set `size` bytes of a tensor from byte `offset` on to a word; all are multiples of four."""
    write = tvm_ffi.get_global_func("runtime.TVMTensorCopyFromBytes")
    words = np.full(min(size, PIECE) // 4, value, np.uint32)
    for begin in range(0, size, PIECE):
        count = min(PIECE, size - begin)
        part = _words(tensor, offset + begin, count)
        write(part, words.ctypes.data_as(ctypes.c_void_p), count)


def copy(to: Any, to_offset: int, source: Any, offset: int, size: int) -> None:
    """Copy `size` bytes between tensors, or within one where the parts do not overlap."""
    move = tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")
    move(_words(source, offset, size), _words(to, to_offset, size))


def stats(index: int) -> str:
    """JSON: what Metal recommends as the most memory; what is used of it, it does not say."""
    total = tvm_ffi.get_global_func("runtime.GetDeviceAttr")(METAL, index, TOTAL_MEMORY)
    used = dict.fromkeys(("used_bytes", "block_bytes", "peak_bytes"), 0)
    return json.dumps(used | {"budget_bytes": int(total)})


def _words(tensor: Any, offset: int, size: int) -> Any:
    """A view of bytes of a tensor as words."""
    view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
    return view(tensor, tvm_ffi.Shape([size // 4]), tvm_ffi.dtype("uint32"), offset)


def _load_library() -> None:
    spec = importlib.util.find_spec("tvm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    try:
        ctypes.CDLL(str(Path(folders[0] if folders else "", "lib", RUNTIME)), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DeviceError(f"device metal: TVM's runtime cannot be loaded: {error}") from None
