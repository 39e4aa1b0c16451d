"""Host memory that kernels can use: aligned, zeroed on first touch, shared without copies."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from k3tvm._ffi import tvm_ffi

Array = np.ndarray[Any, Any]


def zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """A page-aligned array of zeros; pages cost memory only once they are written."""
    count = int(np.prod(shape, dtype=np.int64))
    nbytes = max(count * np.dtype(dtype).itemsize, 1)
    block = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 4 << 20:
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, dtype, count).reshape(shape)


def share(array: Array) -> Any:
    """The same memory as a TVM tensor; the array must be contiguous and 64-byte aligned."""
    return tvm_ffi.from_dlpack(array, require_alignment=64, require_contiguous=True)


def copy_in(array: Array) -> Any:
    """A TVM tensor with a copy of a small array."""
    copy = zeros(array.shape, array.dtype.str)
    copy[...] = array
    return share(copy)


def numpy(tensor: Any) -> Array:
    """A TVM tensor as an array over the same memory."""
    return np.from_dlpack(tensor)
