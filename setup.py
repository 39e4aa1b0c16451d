"""Builds the Vulkan plug-in while k3tvm is installed; everything else is in pyproject.toml.

The plug-in is C++ against the headers in TVM's wheel. Where it cannot be built (no compiler, no
Vulkan headers) the installation goes on without it and says so in one line; asking for a Vulkan
device then says it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NAME = "k3tvm.vulkan.libk3tvm_vulkan"


class BuildPlugin(build_ext):
    """Compiles the plug-in with its own function, where setuptools wants an extension."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without Python's suffix: it is no Python extension, and serves every Python."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Build, or say why not and go on."""
        # The sources' own package; a build does not have its folder on the search path.
        sys.path.insert(0, str(Path(__file__).parent))
        from k3tvm.errors import DeviceError
        from k3tvm.vulkan.compile_plugin import compile_plugin

        try:
            compile_plugin(Path(self.get_ext_fullpath(ext.name)))
        except DeviceError as error:
            self.warn(str(error))


setup(ext_modules=[Extension(NAME, sources=[], optional=True)], cmdclass={"build_ext": BuildPlugin})
