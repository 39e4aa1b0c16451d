"""Finds out, before a kernel is translated, which of its pointers it reads and writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm


def contains(node: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether an expression has a part that is wanted."""
    found: list[Any] = []

    def look(part: Any) -> None:
        if wanted(part):
            found.append(part)

    tvm_ffi.structural_walk(node, (tvm.ir.Expr, look))
    return bool(found)


def loads(node: Any) -> bool:
    """Whether an expression reads memory: its value is not the same at another time."""
    return contains(node, lambda part: type(part).__name__ == "TensorLoad")


def acts(node: Any) -> bool:
    """Whether an expression may do more than compute a value."""
    return contains(node, lambda part: operator(part) in ("call_extern", "atomic_add"))


def operator(node: Any) -> str:
    """The name of what a call calls, without its dialect; empty for what is no call."""
    if type(node).__name__ != "Call":
        return ""
    return str(getattr(node.op, "name", node.op)).split(".")[-1]


@dataclass
class Usage:
    """Parameters by what is done to them, how often variables occur, whether threads wait."""

    variables: Counter[Any] = field(default_factory=Counter)
    read: set[Any] = field(default_factory=set)
    written: set[Any] = field(default_factory=set)
    synchronises: bool = False
    noalias: bool = False

    def access(self, parameter: Any) -> str:
        """The GLSL qualifiers of the memory behind a pointer parameter.

        Nothing else refers to what is only read, if the function says that its parameters do not
        overlap. What is both read and written is kept coherent if threads wait for each other:
        one may read what another wrote.
        """
        if parameter not in self.written:
            return "readonly restrict" if self.noalias else "readonly"
        return "coherent" if parameter in self.read and self.synchronises else ""


def usage(function: Any) -> Usage:
    """Look through the body of a device function."""
    found = Usage(noalias=bool(function.attrs.get("tirx.noalias", False)))
    origin: dict[Any, Any] = {p: p for p in function.params}

    def declare(node: Any) -> None:
        data = node.data
        if type(data).__name__ == "Call" and len(data.args) == 1:
            data = data.args[0]
        if data in origin:
            origin[node.buffer] = origin[data]

    def note_call(name: str, arguments: Any) -> None:
        found.synchronises |= name == "tvm_storage_sync"
        stores = name == "call_extern" and str(arguments[0].value) == "k3_coopmat_store"
        if name == "atomic_add" or stores:
            source = arguments[3 if stores else 0].args[0].source
            found.written |= {origin[source]} if source in origin else set()

    def note(node: Any) -> None:
        kind = type(node).__name__
        if kind == "DeclBuffer":
            declare(node)
        elif kind == "TensorLoad" and node.source in origin:
            found.read.add(origin[node.source])
        elif kind == "Var":
            found.variables[node] += 1
        elif kind == "BufferStore" and node.buffer in origin:
            found.written.add(origin[node.buffer])
        elif kind == "Call":
            note_call(operator(node), node.args)

    tvm_ffi.structural_walk(
        function.body, ((tvm.ir.Expr, note), (tvm.tirx.Stmt, note)), order="pre"
    )
    return found
