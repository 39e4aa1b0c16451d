"""Checks a native library before it is loaded: is it whole, and for this TVM?"""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

from k3tvm._ffi import PINS
from k3tvm.errors import DeviceError

ABI = " ".join(f"{package}=={version}" for package, version in PINS.items())
ELF = struct.Struct("<40xQ10xHH2x")  # of 64 bits: where sections are listed, in how many pieces
STAMP = re.compile(rb"k3tvm-abi\[([^\]]*)\]")
REBUILD = "run: k3tvm doctor --build"


def built_for(library: Path) -> str:
    """The TVM versions that a library was built for; "" for a file that is not one of ours."""
    data = library.read_bytes()
    found = STAMP.search(data) if _whole(data) else None
    return found[1].decode() if found else ""


def _whole(data: bytes) -> bool:
    """Whether an ELF file is not cut short: its last part, the table of sections, is there."""
    if not data.startswith(b"\x7fELF"):
        return True  # of another system, which this cannot judge
    if len(data) < ELF.size:
        return False
    table, size, count = ELF.unpack_from(data)
    return table + size * count <= len(data)


def check(library: Path, where: str, packages: str) -> None:
    """Refuse a library that would crash, before the dynamic linker sees it (F28)."""
    if not library.is_file():
        raise DeviceError(
            f"was not built ({library} is missing)",
            where=where,
            cure=f"apt install {packages}, then {REBUILD}",
        )
    found = built_for(library)
    if found != ABI:
        raise DeviceError(
            f"was built for {found or 'something else, or is damaged'}, here is {ABI}",
            where=where,
            cure=REBUILD,
        )


def load(library: Path, where: str) -> None:
    """Load a checked library."""
    try:
        ctypes.CDLL(str(library))
    except (OSError, UnicodeDecodeError) as error:  # the linker cites names that it cannot find
        raise DeviceError(f"cannot be loaded: {error}", where=where, cure=REBUILD) from None
