"""Small questions about TIR nodes: what is called, what is read, what is written."""

from __future__ import annotations

from collections.abc import Callable
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


def stored_by_call(call: Any) -> Any | None:
    """The buffer into which a call writes at address_of(buffer[i]), if it does."""
    name = operator(call)
    if name == "atomic_add":
        return call.args[0].args[0].source
    if name == "call_extern" and str(call.args[0].value) == "k3_coopmat_store":
        return call.args[3].args[0].source
    return None


def viewed(declaration: Any) -> Any:
    """What a DeclBuffer is a view of: a parameter, or another buffer."""
    data = declaration.data
    return data.args[0] if type(data).__name__ == "Call" and len(data.args) == 1 else data
