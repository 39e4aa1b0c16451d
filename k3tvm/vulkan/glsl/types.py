"""Turns TIR dtypes into GLSL types, and says how large they are and how arguments are named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from k3tvm.errors import TargetError


class UnsupportedError(TargetError):
    """A construct of TIR that has no GLSL form here; `kernel.translate` adds the kernel's name."""


# Components of a vector
LANES = "xyzw"


@dataclass(frozen=True)
class Element:
    """One scalar type: GLSL names, bytes in memory, letter of a kernel argument (`module.py`)."""

    scalar: str
    vector: str
    size: int
    kind: str


ELEMENTS = {
    "bool": Element("bool", "bvec", 1, "b"),
    "int8": Element("int8_t", "i8vec", 1, "c"),
    "uint8": Element("uint8_t", "u8vec", 1, "C"),
    "int16": Element("int16_t", "i16vec", 2, "w"),
    "uint16": Element("uint16_t", "u16vec", 2, "W"),
    "int32": Element("int", "ivec", 4, "i"),
    "uint32": Element("uint", "uvec", 4, "I"),
    "int64": Element("int64_t", "i64vec", 8, "l"),
    "uint64": Element("uint64_t", "u64vec", 8, "L"),
    "float16": Element("float16_t", "f16vec", 2, "h"),
    "float32": Element("float", "vec", 4, "f"),
    "float64": Element("double", "dvec", 8, "d"),
}


@dataclass(frozen=True)
class DType:
    """A scalar type of TIR and a number of lanes."""

    base: str
    lanes: int = 1

    def __str__(self) -> str:
        return self.base if self.lanes == 1 else f"{self.base}x{self.lanes}"

    @property
    def glsl(self) -> str:
        """The GLSL type; UnsupportedError for more than four lanes."""
        element = ELEMENTS[self.base]
        if self.lanes == 1:
            return element.scalar
        if self.lanes > 4:
            raise UnsupportedError(f"GLSL has no vectors of {self.lanes} lanes ({self})")
        return f"{element.vector}{self.lanes}"

    @property
    def size(self) -> int:
        """Bytes of the value in memory."""
        return ELEMENTS[self.base].size * self.lanes

    @property
    def stored(self) -> DType:
        """The type in buffers: bool is a byte there, as it is on the host."""
        return DType("uint8", self.lanes) if self.base == "bool" else self

    @property
    def scalar(self) -> DType:
        """The type of one lane."""
        return DType(self.base)

    def with_lanes(self, lanes: int) -> DType:
        """The same scalar type with another number of lanes."""
        return DType(self.base, lanes)

    @property
    def is_float(self) -> bool:
        """Whether it is a floating point type."""
        return self.base.startswith("float")

    @property
    def is_signed(self) -> bool:
        """Whether it is a signed integer type."""
        return self.base.startswith("int")

    @property
    def is_unsigned(self) -> bool:
        """Whether it is an unsigned integer type."""
        return self.base.startswith("uint")


def dtype(text: Any) -> DType:
    """Parse a TIR dtype such as "float16x4"; UnsupportedError for types that GLSL lacks."""
    match = re.fullmatch(r"([a-z]+?[0-9]*)(?:x([0-9]+))?", str(text))
    base = match.group(1) if match else ""
    base = "bool" if base == "uint1" else base
    if match is None or base not in ELEMENTS:
        raise UnsupportedError(f"GLSL has no type {text}")
    return DType(base, int(match.group(2) or 1))


def type_of(node: Any) -> DType:
    """The dtype of a TIR expression."""
    return dtype(node.ty.dtype)
