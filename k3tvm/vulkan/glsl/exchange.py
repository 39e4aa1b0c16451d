"""Finds the device memory through which the threads of a workgroup hand values to each other.

That is memory which is read after a barrier after it was written: it must be `coherent`, and the
barriers of the kernel must order it. Memory that is read first and written last, such as state, or
by each thread for itself between two barriers, needs neither; a fence per barrier would cost most
of the time of a short loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl.access import operator, stored_by_call

Kind = Literal["read", "write", "wait", "loop"]


@dataclass(frozen=True)
class Event:
    """Something that happens to the memory of a parameter, a barrier, or a loop of events."""

    kind: Kind
    parameter: Any = None
    body: tuple[Event, ...] = ()


def events(node: Any, origin: dict[Any, Any]) -> Iterator[Event]:
    """What a statement does, in order. origin: buffers -> parameters."""
    kind = type(node).__name__
    if kind == "SeqStmt":
        for child in node.seq:
            yield from events(child, origin)
    elif kind == "IfThenElse":
        yield from _inside(node.condition, origin)
        yield from events(node.then_case, origin)
        if node.else_case is not None:
            yield from events(node.else_case, origin)
    elif kind in ("For", "While"):
        head = tuple(_inside(node.condition, origin)) if kind == "While" else ()
        yield from _loop((*head, *events(node.body, origin)))
    elif kind == "AttrStmt":
        yield from events(node.body, origin)
    else:
        yield from _inside(node, origin)
        if kind == "BufferStore" and node.buffer in origin:
            yield Event("write", origin[node.buffer])


def _loop(body: tuple[Event, ...]) -> Iterator[Event]:
    if body:
        yield Event("loop", body=body)


def _inside(node: Any, origin: dict[Any, Any]) -> Iterator[Event]:
    """The reads of an expression or simple statement, then what its calls do."""
    reads: list[Any] = []
    calls: list[Any] = []

    def note(part: Any) -> None:
        kind = type(part).__name__
        if kind == "TensorLoad" and part.source in origin:
            reads.append(origin[part.source])
        elif kind == "Call":
            calls.append(part)

    tvm_ffi.structural_walk(node, (tvm.ir.Expr, note))
    yield from (Event("read", parameter) for parameter in reads)
    for call in calls:
        if operator(call) == "tvm_storage_sync":
            yield Event("wait")
        elif stored_by_call(call) in origin:
            yield Event("write", origin[stored_by_call(call)])


@dataclass
class Exchange:
    """Follows events. waited: written parameters -> whether a barrier came after."""

    waited: dict[Any, bool] = field(default_factory=dict)
    found: set[Any] = field(default_factory=set)

    def follow(self, happened: tuple[Event, ...]) -> None:
        """Go through events; through a loop again, as long as its end changes its start."""
        for event in happened:
            if event.kind == "loop":
                self._loop(event.body)
            elif event.kind == "wait":
                self.waited = dict.fromkeys(self.waited, True)
            elif event.kind == "write":
                self.waited.setdefault(event.parameter, False)
            elif self.waited.get(event.parameter):
                self.found.add(event.parameter)

    def _loop(self, body: tuple[Event, ...]) -> None:
        before = None
        while before != self.waited:
            before = dict(self.waited)
            self.follow(body)


def exchanged(body: Any, origin: dict[Any, Any]) -> set[Any]:
    """The parameters whose memory carries values from thread to thread."""
    walk = Exchange()
    walk.follow(tuple(events(body, origin)))
    return walk.found
