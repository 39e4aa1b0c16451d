"""Gives the stock TVM wheel what it lacks for Vulkan: a code generator and a device plug-in."""

from __future__ import annotations

import os
from contextlib import suppress


def autoload() -> None:
    """Register device and code generator when TVM is imported (entry point of `tvm.backends`).

    Whoever imports TVM for something else must not suffer: nothing is raised or printed. What is
    wrong is said when Vulkan is asked for, and by `k3tvm doctor`. K3TVM_VULKAN=off switches it off.
    """
    if os.environ.get("K3TVM_VULKAN") == "off":
        return
    with suppress(Exception):
        from k3tvm.vulkan import plugin

        plugin.load()
        from k3tvm.vulkan.build import register

        register()
