"""Finds the plug-in's shared library, checks that it belongs to this TVM, and loads it.

Loading needs TVM's runtime, not its compiler. It opens no driver: that happens when a device is
first asked for.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from k3tvm._ffi import PINS, load_runtime, tvm_ffi
from k3tvm.errors import DeviceError
from k3tvm.vulkan.compile_plugin import LIBRARY as NAME
from k3tvm.vulkan.compile_plugin import WHERE, compile_plugin

LIBRARY = Path(__file__).parent / NAME
ABI = " ".join(f"{package}=={version}" for package, version in PINS.items())
ELF = struct.Struct("<40xQ10xHH2x")  # of 64 bits: where sections are listed, in how many pieces
STAMP = re.compile(rb"k3tvm-abi\[([^\]]*)\]")
REBUILD = "run: k3tvm doctor --build"


class VulkanError(DeviceError):
    """A call of the Vulkan plug-in failed, or was wrong."""


class VulkanOutOfMemory(DeviceError):
    """A device has not the memory that was asked for; the message has the numbers."""


class VulkanDeviceLost(DeviceError):
    """The driver gave the device up; the process cannot use it any more."""


class VulkanNoDevice(DeviceError):
    """There is no such device, or it lacks something that every kernel needs."""


class VulkanLimit(DeviceError):
    """A kernel needs more of something than the device has."""


ERRORS = (VulkanError, VulkanOutOfMemory, VulkanDeviceLost, VulkanNoDevice, VulkanLimit)


def build() -> Path:
    """Compile the plug-in where `load` finds it, and return its path.

    DeviceError when the compiler or the Vulkan headers are missing.
    """
    compile_plugin(LIBRARY)
    return LIBRARY


def built_for(library: Path) -> str:
    """The TVM versions that a library was built for; "" for a file that is not the plug-in."""
    data = library.read_bytes()
    found = STAMP.search(data) if _whole(data) else None
    return found[1].decode() if found else ""


def _whole(data: bytes) -> bool:
    """Whether an ELF file is not cut short: its last part, the table of sections, is there."""
    if not data.startswith(b"\x7fELF"):
        return True  # of another system, which this cannot judge
    if len(data) < ELF.size:
        return False
    table, size, count = ELF.unpack_from(data)
    return table + size * count <= len(data)


@cache
def load() -> None:
    """Register the device, the module reader and the functions `k3tvm.vulkan.*` with TVM.

    Opens no driver. A TVM that was built with its own Vulkan is left alone, unless the environment
    says K3TVM_VULKAN=own: its modules are of another kind. DeviceError when that is so, or the
    plug-in was not built, or is for another TVM.
    """
    load_runtime()
    if provider() == "TVM" and os.environ.get("K3TVM_VULKAN") != "own":
        raise DeviceError(
            "is not used, for TVM was built with its own Vulkan",
            where=WHERE,
            cure="to prefer it, set K3TVM_VULKAN=own",
        )
    _check(LIBRARY)
    for error in ERRORS:
        tvm_ffi.error.register_error(error.__name__, error)
    try:
        ctypes.CDLL(str(LIBRARY))
    except (OSError, UnicodeDecodeError) as error:  # the linker cites names that it cannot find
        raise DeviceError(f"cannot be loaded: {error}", where=WHERE, cure=REBUILD) from None


def provider() -> Literal["k3tvm", "TVM", "nobody"]:
    """Who answers for Vulkan devices in this process."""
    load_runtime()
    if tvm_ffi.get_global_func("k3tvm.vulkan.abi", allow_missing=True) is not None:
        return "k3tvm"
    own = tvm_ffi.get_global_func("device_api.vulkan", allow_missing=True)
    return "nobody" if own is None else "TVM"


def _check(library: Path) -> None:
    """Refuse a library that would crash, before the dynamic linker sees it (F28)."""
    if not library.is_file():
        raise DeviceError(
            f"was not built ({library} is missing)",
            where=WHERE,
            cure=f"apt install libvulkan-dev g++, then {REBUILD}",
        )
    found = built_for(library)
    if found != ABI:
        raise DeviceError(
            f"was built for {found or 'something else, or is damaged'}, here is {ABI}",
            where=WHERE,
            cure=REBUILD,
        )


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
