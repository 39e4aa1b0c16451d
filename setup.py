"""Builds the native libraries while k3tvm is installed; everything else is in pyproject.toml.

They are C++ against the headers in TVM's wheels. Where one cannot be built (no compiler, no Vulkan
headers) the installation goes on without it and says so in one line; asking for what it does then
says it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE, VULKAN = "k3tvm.native.libk3tvm_native", "k3tvm.vulkan.libk3tvm_vulkan"


class BuildLibraries(build_ext):
    """Compiles them with their own functions, where setuptools wants extensions."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without Python's suffix: they are no Python extensions, and serve every Python."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Build, or say why not and go on."""
        # The sources' own package; a build does not have its folder on the search path.
        sys.path.insert(0, str(Path(__file__).parent))
        from k3tvm import native
        from k3tvm.errors import DeviceError
        from k3tvm.vulkan.compile_plugin import compile_plugin

        compilers = {NATIVE: native.build, VULKAN: compile_plugin}
        try:
            compilers[ext.name](Path(self.get_ext_fullpath(ext.name)))
        except DeviceError as error:
            self.warn(str(error))


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in (NATIVE, VULKAN)],
    cmdclass={"build_ext": BuildLibraries},
)
