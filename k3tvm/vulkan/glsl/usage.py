"""Finds out, before a kernel is translated, what it does with its parameters and variables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl.access import stored_by_call, viewed
from k3tvm.vulkan.glsl.exchange import exchanged


@dataclass
class Usage:
    """What a kernel does.

    variables: how often they occur. written: parameters into whose memory it writes. exchanged:
    those through which threads hand values to each other. noalias: parameters do not overlap.
    """

    noalias: bool
    variables: Counter[Any] = field(default_factory=Counter)
    written: set[Any] = field(default_factory=set)
    exchanged: set[Any] = field(default_factory=set)

    def access(self, parameter: Any) -> str:
        """The GLSL qualifiers of the memory behind a pointer parameter."""
        if parameter not in self.written:
            return "readonly restrict" if self.noalias else "readonly"
        return "coherent" if parameter in self.exchanged else ""


def usage(function: Any) -> Usage:
    """Look through the body of a device function."""
    found = Usage(bool(function.attrs.get("tirx.noalias", False)))
    origin: dict[Any, Any] = {p: p for p in function.params}

    def wrote(buffer: Any) -> None:
        if buffer in origin:
            found.written.add(origin[buffer])

    def note(node: Any) -> None:
        kind = type(node).__name__
        if kind == "DeclBuffer" and viewed(node) in origin:
            origin[node.buffer] = origin[viewed(node)]
        elif kind == "Var":
            found.variables[node] += 1
        elif kind == "BufferStore":
            wrote(node.buffer)
        elif kind == "Call":
            wrote(stored_by_call(node))

    entries = ((tvm.ir.Expr, note), (tvm.tirx.Stmt, note))
    tvm_ffi.structural_walk(function.body, entries, order="pre")
    found.exchanged = exchanged(function.body, origin)
    return found
