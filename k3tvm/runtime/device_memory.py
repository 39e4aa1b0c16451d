"""Memory of a device behind TVM's device interface; every transfer is a copy."""

from __future__ import annotations

import ctypes
import json
import math
from typing import Any

import numpy as np

from k3tvm._ffi import tvm_ffi

Array = np.ndarray[Any, Any]
VULKAN = 7  # DLPack's number of the device type


class DeviceMemory:
    """Memory of device `index` of a plug-in whose functions are called `prefix`.*.

    What the plug-in refuses (no room, device lost) arrives as DeviceError with its numbers.
    """

    def __init__(self, kind: int, index: int, prefix: str) -> None:
        self.device = tvm_ffi.device(kind, index)
        find = tvm_ffi.get_global_func
        self.fill, self.copy = find(f"{prefix}.fill"), find(f"{prefix}.copy")
        self._stats = find(f"{prefix}.stats")
        self._alloc = find("runtime.TVMTensorAllocWithScope")
        self._view = find("runtime.TVMTensorCreateView")
        self._from_bytes = find("runtime.TVMTensorCopyFromBytes")
        self._to_bytes = find("runtime.TVMTensorCopyToBytes")

    def block(self, shape: tuple[int, ...], dtype: str) -> DeviceBlock:
        """A block of zeros; DeviceError when the device has no room."""
        block = DeviceBlock(self, self.empty(shape, dtype), shape, np.dtype(dtype))
        block.clear(0, math.prod(shape))
        return block

    def room(self) -> int:
        """Bytes that the device has left for this process, as far as its driver tells."""
        return int(self.stats()["budget_bytes"] - self.stats()["used_bytes"])

    def stats(self) -> dict[str, int]:
        """Counters of the plug-in: dispatches, submissions, bytes used, at most and allowed."""
        facts: dict[str, int] = json.loads(self._stats(self.device.index))
        return facts

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new tensor, not initialised."""
        return self._alloc(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), self.device, None)

    def put(self, array: Array) -> Any:
        """A copy of the array on the device."""
        tensor = self.empty(array.shape, str(array.dtype))
        self.write(tensor, array)
        return tensor

    def write(self, tensor: Any, array: Array) -> None:
        """Fill a whole tensor."""
        array = np.ascontiguousarray(array)
        if array.nbytes:
            self._from_bytes(tensor, array.ctypes.data_as(ctypes.c_void_p), array.nbytes)

    def get(self, tensor: Any) -> Array:
        """A copy of a tensor on the host; waits until it is computed."""
        array = np.empty(tuple(tensor.shape), str(tensor.dtype))
        if array.nbytes:
            self._to_bytes(tensor, array.ctypes.data_as(ctypes.c_void_p), array.nbytes)
        return array

    def view(self, tensor: Any, count: int, dtype: Any, offset: int) -> Any:
        """`count` elements of a tensor from byte `offset`, over the same memory."""
        return self._view(tensor, tvm_ffi.Shape([count]), tvm_ffi.dtype(str(dtype)), offset)


class DeviceBlock:
    """A block over a device tensor."""

    def __init__(self, memory: DeviceMemory, tensor: Any, shape: Any, dtype: Any) -> None:
        self.memory, self.tensor, self.dtype = memory, tensor, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def read(self, at: int, count: int) -> Array:
        """A copy of `count` elements from `at`."""
        return self.memory.get(self._part(at, count))

    def write(self, at: int, values: Array) -> None:
        """Overwrite elements from `at` on."""
        self.memory.write(self._part(at, values.size), values.astype(self.dtype, copy=False))

    def clear(self, at: int, count: int) -> None:
        """Set elements to zero; they have four bytes each."""
        size = self.dtype.itemsize
        if count:
            self.memory.fill(self.tensor, at * size, count * size, 0)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy elements within the tensor."""
        size = self.dtype.itemsize
        if count and source != target:
            self.memory.copy(self.tensor, target * size, self.tensor, source * size, count * size)

    def _part(self, at: int, count: int) -> Any:
        return self.memory.view(self.tensor, count, self.dtype, at * self.dtype.itemsize)
