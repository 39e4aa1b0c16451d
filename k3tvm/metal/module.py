"""Reads the kernels out of the bytes of TVM's Metal module, also inside of a finished library.

The bytes are those of TVM 0.27: three fields, every count and length 8 bytes, little endian:

    format, "metal" or "metallib" | functions: name, its information | kernels: name, source or code
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from k3tvm.errors import BundleError

FORMATS = ("metal", "metallib")
KIND = b"metal"


@dataclass(frozen=True)
class MetalModule:
    """Format, and by kernel name: the types of its parameters, launch parameters, source or code.

    types: DLPack's (code, bits, lanes); a pointer has code 3.
    """

    form: str
    types: dict[str, tuple[tuple[int, int, int], ...]]
    tags: dict[str, tuple[str, ...]]
    kernels: dict[str, bytes]


def read_module(data: bytes, where: str = "Metal module") -> MetalModule:
    """The module; BundleError if the bytes are cut short or of another kind."""
    try:
        return _read(_Reader(data))
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise BundleError(f"is not a module of Metal kernels: {error}", where=where) from None


def find_module(library: bytes, where: str = "library") -> MetalModule:
    """The module inside of a linked library or archive; BundleError if there is none."""
    for form in FORMATS:
        # the module's kind, its length in bytes, and its first field
        head = _counted(KIND)
        at = library.find(head)
        while at >= 0:
            begin = at + len(head) + 8
            if library.startswith(_counted(form.encode()), begin):
                size = struct.unpack_from("<Q", library, begin - 8)[0]
                return read_module(library[begin : begin + size], where)
            at = library.find(head, at + 1)
    raise BundleError("has no Metal module inside", where=where)


def _counted(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


class _Reader:
    """Takes bytes apart from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str = "<Q") -> int:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def bytes(self) -> bytes:
        count = self.number()
        if self.at + count > len(self.data):
            raise ValueError("it is cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def text(self) -> str:
        return self.bytes().decode()


def _read(r: _Reader) -> MetalModule:
    form = r.text()
    if form not in FORMATS:
        raise ValueError(f"its format is {form!r}")
    types, tags = {}, {}
    for _ in range(r.number()):
        name = r.text()
        r.text()  # the name again
        types[name] = tuple(
            (r.number("<B"), r.number("<B"), r.number("<H")) for _ in range(r.number())
        )
        tags[name] = tuple(r.text() for _ in range(r.number()))
        for _ in range(r.number()):
            r.number("<i")  # what kind of extra information a parameter has
    kernels = {r.text(): r.bytes() for _ in range(r.number())}
    if r.at != len(r.data):
        raise ValueError("it has bytes after its end")
    return MetalModule(form, types, tags, kernels)
