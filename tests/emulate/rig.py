"""Small CUDA kernels, written by hand, as functions on an emulated device."""

from __future__ import annotations

import ctypes
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from k3tvm import emulate
from k3tvm._tvm import tvm
from k3tvm.compiler.launch import Launch
from k3tvm.emulate.build import emulated_module

Array = np.ndarray[Any, Any]
SEEDS = (0, 1, 7)  # forward, backward, shuffled


def kernel(
    body: str, parameters: dict[str, str], threads: int = 64, functions: str = ""
) -> Callable[..., None]:
    """A kernel of `body`; parameters: C types by name, where pointers are arrays of the device.

    The result takes the arguments in order and, last, the number of blocks.
    """
    emulate.install("cuda")
    given = ", ".join(f"{kind} {name}" for name, kind in parameters.items())
    head = f'extern "C" __global__ void __launch_bounds__({threads}) probe({given}) {{\n'
    types = tuple("handle" if "*" in kind else "int32" for kind in parameters.values())
    launch = Launch("probe", types, ("blockIdx.x",), (threads, 1, 1), (0, 1, 1), 0)
    text = head + textwrap.indent(textwrap.dedent(body), "  ") + "\n}\n"
    function = emulated_module("cuda", text, [launch], functions)["probe"]

    def run(*arguments: Any) -> None:
        function(*(a if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in arguments))

    return run


def on_device(array: Array) -> Any:
    """A copy on the emulated device."""
    emulate.install("cuda")
    return tvm.runtime.tensor(array, tvm.device("cuda", 0))


def room(count: int, dtype: str = "float32") -> Any:
    """Memory of the emulated device that was never written."""
    emulate.install("cuda")
    return tvm.runtime.empty((count,), dtype, tvm.device("cuda", 0))
