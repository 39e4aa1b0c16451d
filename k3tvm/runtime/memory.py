"""Host memory that kernels can use: aligned, zeroed on first touch, shared without copies."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from k3tvm._ffi import tvm_ffi

Array = np.ndarray[Any, Any]


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


def share_all(arrays: Sequence[Array]) -> Any:
    """The same memory as one TVM tuple of tensors."""
    return tvm_ffi.convert([share(a) for a in arrays])


class Inbox:
    """Hands small int32 inputs to kernels: one buffer, filled again by each call."""

    def __init__(self, row: tuple[int, ...]) -> None:
        self.row = row
        self._kept: dict[int, tuple[Array, Any]] = {}

    def put(self, values: Any) -> Any:
        """The values as a TVM tensor [n, *row], valid until the next `put` of as many rows."""
        n = len(values)
        if n not in self._kept:
            array = zeros((n, *self.row), "int32")
            self._kept = {n: (array, share(array))}
        array, tensor = self._kept[n]
        array[...] = values
        return tensor


def numpy(tensor: Any) -> Array:
    """A TVM tensor as an array over the same memory."""
    return np.from_dlpack(tensor)
