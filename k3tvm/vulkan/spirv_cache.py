"""Keeps compiled SPIR-V: the part of `k3tvm.compiler.cache` that is called "spirv"."""

from __future__ import annotations

from pathlib import Path

from k3tvm.compiler import cache

KIND = "spirv"


def directory() -> Path:
    """Where the files are."""
    return cache.directory(KIND)


def read(key: str) -> bytes | None:
    """The SPIR-V kept under `key`; None if there is none or the file is damaged."""
    return cache.read(KIND, key)


def write(key: str, spirv: bytes) -> None:
    """Keep SPIR-V; where nothing can be written it is simply compiled again next time."""
    cache.write(KIND, key, spirv)
