"""NVIDIA's GPUs of this machine: TVM's CUDA runtime, and what it lacks for our state tensors.

TVM's wheel has the runtime as a library of its own, which needs NVIDIA's driver and libcudart. No
machine with such a GPU has run this yet.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from k3tvm._ffi import load_runtime, tvm_ffi
from k3tvm.cuda.fatbin import Image, images
from k3tvm.cuda.module import find_module
from k3tvm.cuda.tools import package_folders
from k3tvm.errors import DeviceError

CUDA = 2  # DLPack's number of the device type
WHERE = "CUDA"
DRIVER, CUDART, RUNTIME = "libcuda.so.1", "libcudart.so.13", "libtvm_runtime_cuda.so"
COMPUTE_VERSION, NAME = 4, 5  # TVM's numbers of what a device says about itself
OF_ITS_OWN = ((9, 0), (10, 0))  # capabilities with instructions that later ones do not have
DEVICE_TO_DEVICE, DEFAULT_STREAM = 3, None


@dataclass(frozen=True)
class CudaDevice:
    """A GPU: its number, its name, its compute capability such as (9, 0)."""

    index: int
    name: str
    capability: tuple[int, int]

    @property
    def arch(self) -> str:
        """What to compile for it alone: "sm_90a"."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.capability in OF_ITS_OWN else "")

    def runs(self, image: Image) -> bool:
        """Whether it can run an image of a fat binary.

        Machine code runs on later devices of the same generation, PTX on every later one, and what
        was made for one architecture alone ("sm_90a") only there.
        """
        major, minor = divmod(int("".join(c for c in image.arch if c.isdigit())), 10)
        if image.arch.endswith("a"):
            return self.capability == (major, minor)
        if image.kind == "PTX":
            return self.capability >= (major, minor)
        return self.capability[0] == major and self.capability[1] >= minor


def lacks(device: CudaDevice, library: Path) -> str:
    """Why a device cannot run the code in a library; "" if it can."""
    found = images(find_module(library.read_bytes(), str(library)).code, str(library))
    if any(device.runs(image) for image in found):
        return ""
    there = ", ".join(f"{i.arch}{' (PTX)' if i.kind == 'PTX' else ''}" for i in found)
    major, minor = device.capability
    return f"it has compute capability {major}.{minor}, the code is for {there}"


class Cudart:
    """The functions of libcudart that TVM does not offer, by `ctypes`.

    Errors of the driver arrive as DeviceError with its words.
    """

    def __init__(self, library: Any) -> None:
        self.library, self.most = library, 0
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def count(self) -> int:
        """How many devices there are."""
        number = ctypes.c_int()
        self._call("cudaGetDeviceCount", ctypes.byref(number))
        return number.value

    def fill(self, tensor: Any, offset: int, size: int, value: int) -> None:
        """Set each of `size` bytes of a tensor, from byte `offset` on."""
        to = ctypes.c_void_p(tensor.data_ptr() + offset)
        self._on(tensor.device.index)
        self._call("cudaMemsetAsync", to, value, ctypes.c_size_t(size), DEFAULT_STREAM)

    def copy(self, to: Any, to_offset: int, source: Any, offset: int, size: int) -> None:
        """Copy `size` bytes between tensors of one device; the parts must not overlap."""
        ends = (
            ctypes.c_void_p(to.data_ptr() + to_offset),
            ctypes.c_void_p(source.data_ptr() + offset),
        )
        self._on(to.device.index)
        size_t = ctypes.c_size_t(size)
        self._call("cudaMemcpyAsync", *ends, size_t, DEVICE_TO_DEVICE, DEFAULT_STREAM)

    def stats(self, index: int) -> str:
        """JSON: bytes of a device that all its programs use, and those that it has.

        peak_bytes: the most that was in use whenever this was asked.
        """
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._on(index)
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        used = total.value - free.value
        self.most = max(self.most, used)
        sizes = {"used_bytes": used, "block_bytes": used, "peak_bytes": self.most}
        return json.dumps(sizes | {"budget_bytes": total.value})

    def _on(self, index: int) -> None:
        self._call("cudaSetDevice", index)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            says = self.library.cudaGetErrorString(code).decode()
            raise DeviceError(f"{name}: {says} (error {code})", where=WHERE)


@cache
def load() -> Cudart:
    """Give TVM's runtime its CUDA devices, and register `k3tvm.cuda.{fill,copy,stats}`.

    DeviceError when the driver or libcudart is missing.
    """
    load_runtime()
    try:
        ctypes.CDLL(DRIVER, ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DeviceError(
            f"there is no NVIDIA driver ({error})",
            where=WHERE,
            cure="install it, or use --device cuda-emulated with a bundle for that",
        ) from None
    cudart = Cudart(_load_cudart())
    _check_not_emulated()
    _load(_tvm_folder() / RUNTIME)
    for name in ("fill", "copy", "stats"):
        tvm_ffi.register_global_func(f"k3tvm.cuda.{name}", getattr(cudart, name), override=True)
    return cudart


def _check_not_emulated() -> None:
    """DeviceError where CUDA devices are there, but not those of TVM, which can read modules."""
    there = [
        tvm_ffi.get_global_func(name, allow_missing=True) is not None
        for name in ("device_api.cuda", "ffi.Module.load_from_bytes.cuda")
    ]
    if there == [True, False]:
        raise DeviceError(
            "is emulated in this process", where=WHERE, cure="use another process for the GPU"
        )


def devices() -> list[CudaDevice]:
    """The GPUs of this machine; DeviceError as `load`, and with what the driver says."""
    return [_device(index) for index in range(load().count())]


def find(selector: str = "") -> CudaDevice:
    """The device with that number, or a part of the name; "" is the first."""
    known = devices()
    fits = [d for d in known if selector in ("", str(d.index)) or _names(selector, d)]
    if not fits:
        there = ", ".join(f"{d.index} ({d.name})" for d in known) or "none"
        raise DeviceError(f"device cuda:{selector}: there is none, but: {there}")
    return fits[0]


def _names(selector: str, device: CudaDevice) -> bool:
    return not selector.isdecimal() and selector.lower() in device.name.lower()


def _device(index: int) -> CudaDevice:
    ask = tvm_ffi.get_global_func("runtime.GetDeviceAttr")
    major, minor = str(ask(CUDA, index, COMPUTE_VERSION)).split(".")
    return CudaDevice(index, str(ask(CUDA, index, NAME)), (int(major), int(minor)))


def _load_cudart() -> Any:
    reasons = []
    for path in cudart_candidates():
        try:
            return ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError as error:
            reasons.append(str(error))
    raise DeviceError(
        f"{CUDART} is not found ({reasons[0]})", where=WHERE, cure="pip install 'k3tvm[cuda]'"
    )


def cudart_candidates() -> Iterator[str]:
    """Where libcudart can be: where the system looks, $CUDA_HOME, packages of PyPI."""
    yield CUDART
    folders = [*package_folders()]
    if home := os.environ.get("CUDA_HOME"):
        folders.insert(0, Path(home))
    for folder in folders:
        for library in (folder / "lib64" / CUDART, folder / "lib" / CUDART):
            if library.exists():
                yield str(library)


def _tvm_folder() -> Path:
    spec = importlib.util.find_spec("tvm")
    roots = spec.submodule_search_locations if spec else None
    if not roots:
        raise DeviceError("TVM is not installed", where=WHERE, cure="pip install k3tvm")
    return Path(roots[0]) / "lib"


def _load(library: Path) -> None:
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise DeviceError(
            f"TVM's runtime cannot be loaded: {error}",
            where=WHERE,
            cure="install a driver for CUDA 13 or newer",
        ) from None
