"""Memory that kernels can use: of the host without copies, or of a device with them.

Both kinds answer to the same few calls: a `Block` is one tensor that the engine clears, reads,
writes and copies by ranges of elements; `Memory` makes blocks and moves arrays in and out.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from k3tvm._ffi import tvm_ffi

Array = np.ndarray[Any, Any]


class Block(Protocol):
    """One tensor, addressed by its elements in row-major order."""

    tensor: Any  # as kernels take it
    nbytes: int

    def read(self, at: int, count: int) -> Array:
        """A copy of `count` elements from `at`."""

    def write(self, at: int, values: Array) -> None:
        """Overwrite elements from `at` on."""

    def clear(self, at: int, count: int) -> None:
        """Set elements to zero."""

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy elements within the tensor."""


class Memory(Protocol):
    """Where an engine keeps its tensors."""

    def block(self, shape: tuple[int, ...], dtype: str) -> Block:
        """A block of zeros; DeviceError, OSError or OverflowError when there is no room."""

    def room(self) -> int | None:
        """Bytes that are left; None when nobody keeps count (the host overcommits)."""

    def put(self, array: Array) -> Any:
        """An array as a tensor for kernels. The host shares it, a device copies it."""

    def get(self, tensor: Any) -> Array:
        """A result of kernels as an array; valid until the next call of a kernel."""


class HostMemory:
    """Memory of the CPU: tensors and arrays are the same bytes."""

    def block(self, shape: tuple[int, ...], dtype: str) -> HostBlock:
        """Pages cost memory only once they are written."""
        return HostBlock(zeros(shape, dtype))

    def room(self) -> None:
        """Parameters are mapped files, so there is no number to compare with."""
        return None

    def put(self, array: Array) -> Any:
        """Share a contiguous, 64-byte aligned array."""
        return share(array)

    def get(self, tensor: Any) -> Array:
        """The same memory as an array."""
        return np.from_dlpack(tensor)


class HostBlock:
    """A block over a NumPy array."""

    def __init__(self, array: Array) -> None:
        self.array, self.tensor, self.nbytes = array, share(array), array.nbytes
        self._flat = array.reshape(-1)

    def read(self, at: int, count: int) -> Array:
        """A copy of `count` elements from `at`."""
        return self._flat[at : at + count].copy()

    def write(self, at: int, values: Array) -> None:
        """Overwrite elements from `at` on."""
        self._flat[at : at + values.size] = values.reshape(-1)

    def clear(self, at: int, count: int) -> None:
        """Set elements to zero."""
        self._flat[at : at + count] = 0

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy elements within the tensor."""
        self._flat[target : target + count] = self._flat[source : source + count]


def zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """A page-aligned array of zeros; pages cost memory only once they are written.

    Raises OSError or OverflowError when there is no address space for it.
    """
    count = math.prod(shape)
    nbytes = max(count * np.dtype(dtype).itemsize, 1)
    block = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 4 << 20:
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, dtype, count).reshape(shape)


def share(array: Array) -> Any:
    """The same memory as a TVM tensor; the array must be contiguous and 64-byte aligned."""
    return tvm_ffi.from_dlpack(array, require_alignment=64, require_contiguous=True)


def as_tuple(tensors: Sequence[Any]) -> Any:
    """Tensors as one TVM tuple."""
    return tvm_ffi.convert(list(tensors))


class Inbox:
    """Hands small int32 inputs to kernels: a block for each number of rows, filled by each call.

    It stays where it is, since a captured graph reads where it did first.
    """

    def __init__(self, memory: Memory, row: tuple[int, ...]) -> None:
        self.memory, self.row = memory, row
        self._kept: dict[int, Block] = {}

    def put(self, values: Any) -> Any:
        """The values as a TVM tensor [n, *row], valid until the next `put` of as many rows."""
        n = len(values)
        if n not in self._kept:
            self._kept[n] = self.memory.block((n, *self.row), "int32")
        self._kept[n].write(0, np.asarray(values, np.int32))
        return self._kept[n].tensor
