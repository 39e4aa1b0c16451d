"""Calls of the named device functions of `k3tvm/cuda/device` from kernels."""

from __future__ import annotations

from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g


def do(word: str, *arguments: Any) -> None:
    """Call `k3_word`; pointers are made by `pointer`."""
    T.evaluate(T.call_extern("int32", f"k3_{word}", *arguments))


def pointer(buffer: Any, index: Any) -> Any:
    """The address of an element. Local arrays stay registers where all indices are constants."""
    return T.address_of(buffer[g.int32(index)])
