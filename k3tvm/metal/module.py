"""Reads the kernels out of the bytes of TVM's Metal module, also inside of a finished library.

They are the format, "metal" or "metallib", the table of kernels (`k3tvm.bundle.kernel_table`), and
each kernel's name with its source or code.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.bundle import kernel_table
from k3tvm.bundle.kernel_table import Reader, Row
from k3tvm.errors import BundleError

FORMATS = ("metal", "metallib")
KIND = "metal"


@dataclass(frozen=True)
class MetalModule:
    """Format, and by kernel name: what a launch must know of it, and its source or code."""

    form: str
    rows: dict[str, Row]
    kernels: dict[str, bytes]


def read_module(data: bytes, where: str = "Metal module") -> MetalModule:
    """The module; BundleError if the bytes are cut short or of another kind."""
    try:
        return _read(Reader(data))
    except ValueError as error:
        raise BundleError(f"is not a module of Metal kernels: {error}", where=where) from None


def find_module(library: bytes, where: str = "library") -> MetalModule:
    """The module inside of a linked library or archive; BundleError if there is none."""
    for form in FORMATS:
        data = kernel_table.find_module(library, KIND, form)
        if data is not None:
            return read_module(data, where)
    raise BundleError("has no Metal module inside", where=where)


def _read(r: Reader) -> MetalModule:
    form = r.text()
    if form not in FORMATS:
        raise ValueError(f"its format is {form!r}")
    rows = r.table()
    kernels = {r.text(): r.blob() for _ in range(r.number())}
    if r.at != len(r.data):
        raise ValueError("it has bytes after its end")
    return MetalModule(form, rows, kernels)
