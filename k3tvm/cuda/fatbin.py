"""Reads fat binaries: which images for which architectures, with which kernels.

The format is not published; this reads what fatbinary of CUDA 13 writes: a head of 16 bytes, then
images, each with a head of its own. Machine code is an ELF file (a "cubin"), where every kernel has
a section of its name. PTX is text, compressed with LZ4 where `nvcc.py` made it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from k3tvm.cuda.lz4 import decompress
from k3tvm.errors import BundleError

MAGIC = 0xBA55ED50
HEAD = struct.Struct("<IHHQ")  # magic, version, size of this head, size of what follows
# kind, version, size of this head, size in the file, compressed size, -, -, architecture, -, flags,
# -, size when decompressed
IMAGE = struct.Struct("<HHIQII4xI8xQQQ")
KINDS: dict[int, Literal["PTX", "ELF"]] = {1: "PTX", 2: "ELF"}
SPECIFIC = 1 << 20  # flag: for this architecture and no later one ("sm_90a")
LZ4, ZSTD = 1 << 13, 1 << 15
SECTION = struct.Struct("<II8x8xQQ")  # name, type, place, size
ENTRY = re.compile(rb"\.visible \.entry (\w+)\(")


@dataclass(frozen=True)
class Image:
    """Code for one architecture, such as "sm_90a": machine code ("ELF") or "PTX".

    stored: as it stands in the file; size: when decompressed; packing: flags that tell how.
    """

    kind: Literal["PTX", "ELF"]
    arch: str
    stored: bytes
    size: int
    packing: int

    @property
    def data(self) -> bytes:
        """Decompressed; ValueError where that is not possible."""
        if self.packing & ZSTD:
            raise ValueError("it is compressed with zstd")
        return decompress(self.stored, self.size) if self.packing & LZ4 else self.stored

    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in it, sorted."""
        names = _sections(self.data) if self.kind == "ELF" else _entries(self.data)
        return tuple(sorted(names))


def images(data: bytes, where: str = "fat binary") -> tuple[Image, ...]:
    """The images, in order; BundleError when the bytes are no fat binary."""
    try:
        return tuple(_images(data))
    except (struct.error, ValueError, IndexError) as error:
        raise BundleError(f"is not a fat binary: {error}", where=where) from None


def has_source(data: bytes) -> bool:
    """Whether CUDA C++ source is in the bytes of a library or fat binary."""
    return any(word in data for word in (b"__global__", b"__launch_bounds__", b"threadIdx.x)"))


def _images(data: bytes) -> Iterator[Image]:
    magic, _, size, rest = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic:#x}")
    if size + rest > len(data):
        raise ValueError("it is cut short")
    at = size
    while at < size + rest:
        kind, _, head, stored, packed, _, number, flags, _, whole = IMAGE.unpack_from(data, at)
        if kind not in KINDS:
            raise ValueError(f"it has an image of kind {kind}")
        arch = f"sm_{number}{'a' if flags & SPECIFIC else ''}"
        payload = data[at + head : at + head + (packed or stored)]
        yield Image(KINDS[kind], arch, payload, whole or stored, flags & (LZ4 | ZSTD))
        at += head + stored


def _sections(elf: bytes) -> set[str]:
    """Kernels of a cubin, which is ELF of 64 bits: sections called ".text.NAME"."""
    if not elf.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("machine code in it is no ELF file")
    table = struct.unpack_from("<Q", elf, 40)[0]
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    sections = [SECTION.unpack_from(elf, table + i * size) for i in range(count)]
    strings = sections[names][2]
    found = (_string(elf, strings + name) for name, *_ in sections)
    return {name.removeprefix(".text.") for name in found if name.startswith(".text.")}


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _entries(ptx: bytes) -> set[str]:
    return {name.decode() for name in ENTRY.findall(ptx)}
