"""CUDA and Metal kernels on the CPU: TVM's devices of these kinds over the host's memory.

For checking results on machines without such a device. Nothing is known of speed, of the rounding
inside of tensor cores, or of a real compiler's faults.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Literal

from k3tvm import native
from k3tvm.errors import DeviceError

Kind = Literal["cuda", "metal"]
TYPES = {"cuda": 2, "metal": 8}  # DLPack's numbers of the device types
NAMES = {"cuda": "CUDA emulated on the CPU", "metal": "Metal emulated on the CPU"}
installed: set[str] = set()  # in this process
PREFER, SEED = "K3TVM_EMULATE", "K3TVM_EMULATE_SEED"


@cache
def install(kind: Kind) -> None:
    """Let TVM's devices of this kind be emulated in this process.

    DeviceError where a real one is present, unless the environment says K3TVM_EMULATE=1: results
    of the two must not be mistaken for each other.
    """
    from k3tvm._ffi import tvm_ffi

    native.load()
    real = _real(kind)
    if real and os.environ.get(PREFER) != "1":
        raise DeviceError(
            f"is not used where {real}",
            where=f"{kind}-emulated",
            cure=f"use --device {kind}, or set {PREFER}=1",
        )
    tvm_ffi.get_global_func("k3tvm.emulate.install")(kind)
    installed.add(kind)
    set_seed(_seed())


def set_seed(seed: int) -> None:
    """The order in which threads of a block take turns: 0 forward, 1 backward, else shuffled."""
    from k3tvm._ffi import tvm_ffi

    native.load()
    tvm_ffi.get_global_func("k3tvm.emulate.set_seed")(seed)


def _seed() -> int:
    text = os.environ.get(SEED, "0")
    if not text.isdecimal():
        raise DeviceError(f"is {text!r}", where=SEED, cure="give a number, 0 or more")
    return int(text)


def _real(kind: Kind) -> str:
    """What shows that there is a real device of this kind; "" when nothing does."""
    from k3tvm._ffi import tvm_ffi

    own = tvm_ffi.get_global_func(f"device_api.{kind}", allow_missing=True)
    if own is not None and kind not in installed:
        return f"TVM has its own {kind} devices"
    if kind == "metal":
        return "there is Metal" if sys.platform == "darwin" else ""
    return "there is an NVIDIA GPU" if _cuda_devices() else ""


def _cuda_devices() -> int:
    """How many devices the CUDA driver has; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value
