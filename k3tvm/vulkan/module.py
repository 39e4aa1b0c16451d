"""Turns compiled kernels into the blob that the device plug-in reads, and back.

Little endian; str is a u32 length and bytes:
  "K3VK" | u32 format | u32 kernels | per kernel:
  str name | str kinds | u32 block | u32 tags, u8 per tag | u32 local size x, y, z
  | u32 shared bytes | str features | str GLSL | str SPIR-V
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from k3tvm.bundle.manifest import DeviceKernel
from k3tvm.errors import BundleError

MAGIC, FORMAT = b"K3VK", 1
# Bytes of a parameter by its letter, see KernelInfo
SIZES = dict(zip("PpbcCwWiIlLhfd", (8, 8, 4, 1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8), strict=True))


@dataclass(frozen=True)
class KernelInfo:
    """One compiled kernel.

    kinds: one letter per parameter, in order: P a pointer that is written, p one that is only read
    (8 bytes), b bool as int32, c/C int8/uint8, w/W int16/uint16, i/I int32/uint32, l/L
    int64/uint64, h float16, f float32, d float64; each aligned to its size. block: the arguments
    are in memory and their address is pushed. tags: launch parameters in order, 0..2 blockIdx.x..z
    and 3..5 threadIdx.x..z. local_size: threads of a workgroup. features: what the device must
    support, by the names of `schedules.profile`.
    """

    name: str
    kinds: str
    block: bool
    tags: tuple[int, ...]
    local_size: tuple[int, int, int]
    shared_bytes: int
    features: frozenset[str]
    source: str
    spirv: bytes

    def entry(self) -> DeviceKernel:
        """What the manifest says of it."""
        return DeviceKernel(
            self.name,
            self.local_size,
            self.shared_bytes,
            self.push_bytes,
            tuple(sorted(self.features)),
        )

    @property
    def push_bytes(self) -> int:
        """Bytes that a launch pushes: the arguments, or the address of their block."""
        if self.block:
            return 8
        at = 0
        for kind in self.kinds:
            size = SIZES[kind]
            at = -(-at // size) * size + size
        return at


def write_module(kernels: Sequence[KernelInfo]) -> bytes:
    """The blob of these kernels."""
    head = MAGIC + struct.pack("<II", FORMAT, len(kernels))
    return head + b"".join(_kernel(k) for k in kernels)


def _kernel(k: KernelInfo) -> bytes:
    return b"".join(
        (
            _text(k.name.encode()),
            _text(k.kinds.encode()),
            struct.pack("<II", k.block, len(k.tags)),
            bytes(k.tags),
            struct.pack("<4I", *k.local_size, k.shared_bytes),
            _text(" ".join(sorted(k.features)).encode()),
            _text(k.source.encode()),
            _text(k.spirv),
        )
    )


def _text(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def read_module(blob: bytes, where: str = "Vulkan module") -> tuple[KernelInfo, ...]:
    """The kernels of a blob; BundleError if it is cut short, damaged or of another format."""
    reader = _Reader(blob, where)
    if reader.take(4) != MAGIC:
        raise BundleError("is not a module of Vulkan kernels", where=where)
    form, count = reader.numbers(2)
    if form != FORMAT:
        raise BundleError(
            f"has format {form}, this k3tvm reads {FORMAT}", where=where, cure="compile again"
        )
    kernels = tuple(_read_kernel(reader) for _ in range(count))
    reader.end()
    return kernels


class _Reader:
    """Takes a blob apart from front to back."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise BundleError("is cut short", where=self.where, cure="compile again")
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.take(4 * count))

    def bytes(self) -> bytes:
        return self.take(self.numbers(1)[0])

    def text(self) -> str:
        try:
            return self.bytes().decode()
        except UnicodeDecodeError as error:
            raise BundleError("is damaged", where=self.where, cure="compile again") from error

    def end(self) -> None:
        if self.at != len(self.data):
            raise BundleError("has bytes after its end", where=self.where, cure="compile again")


def _read_kernel(r: _Reader) -> KernelInfo:
    name, kinds = r.text(), r.text()
    block, count = r.numbers(2)
    tags = tuple(r.take(count))
    x, y, z, shared = r.numbers(4)
    features = frozenset(r.text().split())
    return KernelInfo(
        name, kinds, bool(block), tags, (x, y, z), shared, features, r.text(), r.bytes()
    )
