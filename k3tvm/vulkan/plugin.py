"""Finds the plug-in's shared library, checks that it belongs to this TVM, and loads it.

Loading needs TVM's runtime, not its compiler. It opens no driver: that happens when a device is
first asked for.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from k3tvm._ffi import load_runtime, tvm_ffi
from k3tvm.errors import DeviceError
from k3tvm.native.library import check
from k3tvm.native.library import load as load_library
from k3tvm.vulkan.compile_plugin import LIBRARY as NAME
from k3tvm.vulkan.compile_plugin import WHERE, compile_plugin

LIBRARY = Path(__file__).parent / NAME


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
    load_library(LIBRARY, WHERE)


def provider() -> Literal["k3tvm", "TVM", "nobody"]:
    """Who answers for Vulkan devices in this process."""
    load_runtime()
    if tvm_ffi.get_global_func("k3tvm.vulkan.abi", allow_missing=True) is not None:
        return "k3tvm"
    own = tvm_ffi.get_global_func("device_api.vulkan", allow_missing=True)
    return "nobody" if own is None else "TVM"


def _check(library: Path) -> None:
    """Refuse a library that would crash, before the dynamic linker sees it (F28)."""
    check(library, WHERE, "libvulkan-dev g++")


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
