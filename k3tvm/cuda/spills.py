"""Refuses kernels whose registers do not fit where it would cost speed, unless told to allow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase

from k3tvm.cuda.ptxas import Resources
from k3tvm.errors import TargetError

# Operators whose kernels take most of the time; a kernel's name begins with its operator's key.
HOT = ("kda_step", "kda_chunk", "expert_linear", "linear", "mla_attention")

_allowed: ContextVar[tuple[str, ...]] = ContextVar("allowed", default=())


@contextmanager
def allowing_spills(patterns: Sequence[str]) -> Iterator[None]:
    """Inside, kernels whose names fit one of `patterns` ("kda_*") may spill registers."""
    token = _allowed.set(tuple(patterns))
    try:
        yield
    finally:
        _allowed.reset(token)


def check_spills(kernels: Iterable[tuple[str, Resources]]) -> None:
    """TargetError that names the hot kernels that spill and are not allowed to."""
    found = [
        f"{name} {r.spill_bytes} bytes on {r.arch}"
        for name, r in kernels
        if r.spill_bytes and is_hot(name) and not _is_allowed(name)
    ]
    if found:
        raise TargetError(
            f"registers do not fit and are spilled: {', '.join(found)}",
            where="hot CUDA kernels",
            cure="leave out that architecture, or allow it with --allow-spills NAME",
        )


def is_hot(name: str) -> bool:
    """Whether a kernel is one of those that take the time."""
    return name.startswith(tuple(f"{operator}_" for operator in HOT))


def _is_allowed(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _allowed.get())
