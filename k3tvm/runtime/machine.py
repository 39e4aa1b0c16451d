"""The virtual machine that runs a compiled library, through the FFI alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3tvm._ffi import load_runtime, tvm_ffi
from k3tvm.errors import BundleError, DeviceError
from k3tvm.runtime.device import CPU, Device

POOLED = 2  # the allocator that keeps freed memory for reuse
THREADS = "TVM_NUM_THREADS"
Function = Callable[..., Any]
owner: list[int] = []  # the process whose kernel threads these are


class Machine:
    """A loaded library with its own virtual machine on a device."""

    def __init__(self, library: Path, device: Device) -> None:
        load_runtime()
        try:
            executable = tvm_ffi.load_module(str(library))
        except (RuntimeError, ValueError, OSError) as error:
            raise BundleError(
                f"cannot be loaded: {error}", where=str(library), cure="compile it again"
            ) from None
        self._vm = executable["vm_load_executable"]()
        # its own device first, then the one for shapes and small bookkeeping
        own, host = (device.type, device.index, POOLED), (CPU, 0, POOLED)
        self._vm["vm_initialization"](*own, *(() if own == host else host))

    def __getitem__(self, entry: str) -> Function:
        """An entry function by name."""
        function: Function = self._vm[entry]
        return function

    def instrument(self, watch: Function) -> None:
        """Call watch(function, name, before, result, *args) around every call that is made."""
        self._vm["set_instrument"](tvm_ffi.convert(watch))


def threads_in_use() -> int:
    """How many threads kernels use; the same for all engines of a process."""
    return int(os.environ.get(THREADS, "1"))


def check_process() -> None:
    """DeviceError in a process that was forked from one with kernel threads: it has none of them.

    Whatever waits for them, the end of the process included, would wait for ever.
    """
    if owner and os.getpid() not in owner:
        raise DeviceError(
            f"engines were opened in process {owner[0]}, before this one was forked from it",
            cure="open them in the new process only, or start that anew (multiprocessing: spawn)",
        )


def set_threads(threads: int) -> None:
    """Let kernels use this many threads from now on."""
    check_process()
    if threads < 1:
        raise DeviceError(f"{threads} threads: at least one is needed")
    most = os.cpu_count() or threads
    if threads > most:  # workers spin while they wait: more of them than CPUs come to a halt
        raise DeviceError(f"{threads} threads: this machine has {most} CPUs")
    load_runtime()
    owner[:] = [os.getpid()]
    os.environ[THREADS] = str(threads)
    tvm_ffi.get_global_func("runtime.config_threadpool")(0, threads)
