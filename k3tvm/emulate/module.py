"""Turns kernels and their compiled library into the blob that the native library loads.

Little endian; str is a u32 length and bytes:
  "K3EM" | u32 format | str language | str library (ELF) | u32 kernels | per kernel:
  str name | str kinds | u32 tags, u8 per tag | u32 threads x, y, z
kinds: one letter per parameter, in order: p a pointer, f float32, d float64, i an integer. tags:
launch parameters in order, 0..2 blockIdx.x..z and 3..5 threadIdx.x..z.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from k3tvm.compiler.launch import Launch
from k3tvm.errors import TargetError

MAGIC, FORMAT = b"K3EM", 3
TAGS = {
    f"{kind}.{axis}": 3 * k + a
    for k, kind in enumerate(("blockIdx", "threadIdx"))
    for a, axis in enumerate("xyz")
}


def write_module(language: str, library: bytes, kernels: Sequence[Launch]) -> bytes:
    """The blob of a library of kernels."""
    head = MAGIC + struct.pack("<I", FORMAT) + _text(language.encode()) + _text(library)
    return head + struct.pack("<I", len(kernels)) + b"".join(map(_kernel, kernels))


def _kernel(k: Launch) -> bytes:
    kinds = "".join(_letter(p, k.name) for p in k.parameters)
    tags = bytes(TAGS[t] for t in k.tags)
    return b"".join(
        (
            _text(k.name.encode()),
            _text(kinds.encode()),
            struct.pack("<I", len(tags)),
            tags,
            struct.pack("<3I", *k.threads),
        )
    )


def _letter(parameter: str, kernel: str) -> str:
    known = {"handle": "p", "float32": "f", "float64": "d"}
    if parameter in known:
        return known[parameter]
    if parameter.startswith(("int", "uint", "bool")):
        return "i"
    raise TargetError(f"a parameter of type {parameter} is not emulated", where=f"kernel {kernel}")


def _text(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
