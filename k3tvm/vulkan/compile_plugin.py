"""Turns `native/*.cc` into the Vulkan plug-in; needs g++ and the Vulkan headers."""

from __future__ import annotations

from pathlib import Path

from k3tvm.native.build import Sources, compile_library

NATIVE = Path(__file__).parent / "native"
LIBRARY = "libk3tvm_vulkan.so"
WHERE = "the Vulkan plug-in"


def compile_plugin(output: Path) -> None:
    """Write the library to `output`, whole or not at all.

    DeviceError when a compiler or a header is missing, or a file does not compile.
    """
    header = ("vulkan/vulkan.h", "Vulkan")
    compile_library(Sources(WHERE, NATIVE, "libvulkan-dev g++", header), output)
