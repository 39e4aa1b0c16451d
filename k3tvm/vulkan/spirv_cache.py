"""Keeps compiled SPIR-V in files by the hash of what it was made from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

MAGIC = b"K3SPV1\0\0"


def directory() -> Path:
    """K3TVM_CACHE, else k3tvm below XDG_CACHE_HOME, else below ~/.cache; `spirv` inside."""
    chosen = os.environ.get("K3TVM_CACHE")
    if chosen:
        return Path(chosen) / "spirv"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "k3tvm" / "spirv"


def read(key: str) -> bytes | None:
    """The SPIR-V kept under `key`; None if there is none or the file is damaged."""
    try:
        data = (directory() / key).read_bytes()
    except OSError:
        return None
    head, spirv = data[: len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    return spirv if head == MAGIC + hashlib.sha256(spirv).digest() else None


def write(key: str, spirv: bytes) -> None:
    """Keep SPIR-V; where nothing can be written it is simply compiled again next time."""
    with contextlib.suppress(OSError):
        place = directory()
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(spirv).digest() + spirv)
            os.replace(name, place / key)
        except OSError:
            os.unlink(name)
            raise
