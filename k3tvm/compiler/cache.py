"""Keeps compiled device code in files by the hash of what it was made from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

MAGIC = b"K3CODE1\0"


def directory(kind: str) -> Path:
    """K3TVM_CACHE, else k3tvm below XDG_CACHE_HOME, else below ~/.cache; a folder per `kind`."""
    chosen = os.environ.get("K3TVM_CACHE")
    if chosen:
        return Path(chosen) / kind
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "k3tvm" / kind


def key_of(parts: Iterable[str]) -> str:
    """The key of what is made from all of `parts`: sources, flags, versions of tools."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read(kind: str, key: str) -> bytes | None:
    """What is kept under `key`; None if there is nothing or the file is damaged."""
    try:
        data = (directory(kind) / key).read_bytes()
    except OSError:
        return None
    head, code = data[: len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    return code if head == MAGIC + hashlib.sha256(code).digest() else None


def write(kind: str, key: str, code: bytes) -> None:
    """Keep code; where nothing can be written it is simply compiled again next time."""
    with contextlib.suppress(OSError):
        place = directory(kind)
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(code).digest() + code)
            os.replace(name, place / key)
        except OSError:
            os.unlink(name)
            raise
