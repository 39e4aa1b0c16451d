"""Writes and reads the table of kernels in the bytes of TVM's modules for devices.

The bytes are those of TVM 0.27 for CUDA and Metal: the format of the code, the table, the code.
Every count and length has 8 bytes, little endian. The table has, by kernel: its name twice, the
types of its parameters (DLPack's code, bits, lanes; a pointer has code 3), the launch parameters
that follow them in a call, and what kind of extra information each parameter has.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
HANDLE = (3, 64, 1)


@dataclass(frozen=True)
class Row:
    """One kernel. parameters: types such as "int32", "handle"; tags: such as "blockIdx.x"."""

    name: str
    parameters: tuple[str, ...]
    tags: tuple[str, ...]


def counted(data: bytes) -> bytes:
    """Bytes behind their length."""
    return struct.pack("<Q", len(data)) + data


def write_table(rows: Sequence[Row]) -> bytes:
    """The table."""
    return struct.pack("<Q", len(rows)) + b"".join(_row(row) for row in rows)


def _row(row: Row) -> bytes:
    count = struct.pack("<Q", len(row.parameters))
    types = [struct.pack("<BBH", *_type(p)) for p in row.parameters]
    tags = [counted(tag.encode()) for tag in row.tags]
    name = counted(row.name.encode())
    head = [name, name, count, *types, struct.pack("<Q", len(tags)), *tags]
    return b"".join([*head, count, bytes(4 * len(row.parameters))])


def _type(parameter: str) -> tuple[int, int, int]:
    if parameter == "handle":
        return HANDLE
    if parameter == "bool":
        return CODES["bool"], 8, 1
    match = re.fullmatch(r"(\D+)(\d+)", parameter)
    if match is None or match[1] not in CODES:
        raise ValueError(f"a kernel has a parameter of type {parameter}")
    return CODES[match[1]], int(match[2]), 1


def find_module(library: bytes, kind: str, form: str) -> bytes | None:
    """The bytes of a module of this kind and format inside of a linked library or archive."""
    # the module's kind, its length in bytes, and its first field
    head, first = counted(kind.encode()), counted(form.encode())
    at = library.find(head)
    while at >= 0:
        begin = at + len(head) + 8
        if library.startswith(first, begin):
            return library[begin : begin + int.from_bytes(library[begin - 8 : begin], "little")]
        at = library.find(head, at + 1)
    return None


class Reader:
    """Takes bytes apart from front to back; ValueError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str = "<Q") -> int:
        """The next number, of `struct`'s format."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def blob(self) -> bytes:
        """The next bytes, behind their length."""
        return self.take(self.number())

    def text(self) -> str:
        """The next text, behind its length."""
        return self.blob().decode()

    def take(self, count: int) -> bytes:
        """So many bytes."""
        if self.at + count > len(self.data):
            raise ValueError("it is cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def table(self) -> dict[str, Row]:
        """The next table of kernels."""
        rows = [self._row() for _ in range(self.number())]
        return {row.name: row for row in rows}

    def _row(self) -> Row:
        name = self.text()
        self.text()
        types = [self._type() for _ in range(self.number())]
        tags = [self.text() for _ in range(self.number())]
        self.take(4 * self.number())
        return Row(name, tuple(types), tuple(tags))

    def _type(self) -> str:
        code, bits, lanes = self.number("<B"), self.number("<B"), self.number("<H")
        if (code, bits, lanes) == HANDLE:
            return "handle"
        names = {number: name for name, number in CODES.items()}
        if code not in names or lanes != 1:
            raise ValueError(f"a parameter has type {code}, {bits}, {lanes}")
        return "bool" if names[code] == "bool" else f"{names[code]}{bits}"
