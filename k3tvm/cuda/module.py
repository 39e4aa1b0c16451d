"""Writes and reads the bytes of TVM's CUDA module, also inside of a finished library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3tvm.bundle import kernel_table
from k3tvm.bundle.kernel_table import Reader, Row, counted, write_table
from k3tvm.errors import BundleError

FORMAT = "fatbin"
KIND = "cuda"


@dataclass(frozen=True)
class CudaModule:
    """Kernels by name, and the fat binary with their code."""

    kernels: dict[str, Row]
    code: bytes


def write_module(kernels: Sequence[Row], code: bytes) -> bytes:
    """The bytes that `ffi.Module.load_from_bytes.cuda` takes."""
    return counted(FORMAT.encode()) + write_table(kernels) + counted(code)


def read_module(data: bytes, where: str = "CUDA module") -> CudaModule:
    """The module; BundleError if the bytes are cut short or hold code in another form."""
    reader = Reader(data)
    try:
        form = reader.text()
        if form != FORMAT:
            raise ValueError(f"its format is {form!r}")
        module = CudaModule(reader.table(), reader.blob())
        if reader.at != len(data):
            raise ValueError("it has bytes after its end")
    except ValueError as error:
        raise BundleError(f"is not a module of CUDA kernels: {error}", where=where) from None
    return module


def find_module(library: bytes, where: str = "library") -> CudaModule:
    """The module inside of a linked library; BundleError if there is none."""
    data = kernel_table.find_module(library, KIND, FORMAT)
    if data is None:
        raise BundleError("has no CUDA module with a fat binary inside", where=where)
    return read_module(data, where)
