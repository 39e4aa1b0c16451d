"""The oracle of the traffic analysis: a kernel's integers are executed thread by thread.

Slow and simple: one dictionary of variables per thread, every access noted as (tensor, element).
Kernels whose indices depend on shared memory or on numbers are beyond it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np

OPERATIONS = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a % b,
    "Div": lambda a, b: int(a / b),
    "Mod": lambda a, b: int(math.fmod(a, b)),
    "Min": min,
    "Max": max,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "And": lambda a, b: a and b,
    "Or": lambda a, b: a or b,
}


class Thread:
    """One thread; `known` are sizes and scalars, `data` the integer tensors by name."""

    def __init__(self, known: dict[Any, int], tensors: dict[Any, str], data: dict[str, np.ndarray]):
        self.known, self.tensors, self.data = dict(known), tensors, data
        self.cells: dict[Any, int] = {}
        self.loads: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.stores: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def value(self, node: Any) -> Any:
        """An integer, a range of them, or None for what is no integer."""
        kind = type(node).__name__
        if kind == "Var":
            return self.known.get(node)
        if kind == "IntImm":
            return int(node.value)
        if kind == "Ramp":
            start = self.value(node.base)
            return range(start, start + int(node.lanes))
        if kind == "TensorLoad":
            return self.load(node)
        if kind == "Select":
            c, yes, no = map(self.value, (node.condition, node.true_value, node.false_value))
            return yes if c else no
        if kind in OPERATIONS:
            a, b = self.value(node.a), self.value(node.b)
            if isinstance(a, range):
                return range(a.start + b, a.stop + b)
            return None if a is None or b is None else OPERATIONS[kind](a, b)
        parts = [self.value(p) for p in children(node)]
        return parts[0] if kind == "Cast" else None

    def load(self, node: Any) -> Any:
        index = [self.value(i) for i in node.indices]
        if node.source in self.tensors:
            self.note(self.loads, node.source, index)
            data = self.data.get(self.tensors[node.source])
            return None if data is None else int(data[tuple(index)])
        return self.cells.get(node.source)

    def note(self, where: Counter[Any], buffer: Any, index: list[Any]) -> None:
        last = index[-1] if isinstance(index[-1], range) else [index[-1]]
        for i in last:
            where[self.tensors[buffer], (*index[:-1], i)] += 1

    def run(self, node: Any) -> None:
        """Execute a statement."""
        kind = type(node).__name__
        if kind == "SeqStmt":
            for child in node.seq:
                self.run(child)
        elif kind == "Bind":
            self.known[node.var] = self.value(node.value)
        elif kind == "For":
            first = self.value(node.min)
            for i in range(first, first + self.value(node.extent)):
                self.known[node.loop_var] = i
                self.run(node.body)
        elif kind == "IfThenElse":
            case = node.then_case if self.value(node.condition) else node.else_case
            if case is not None:
                self.run(case)
        elif kind == "BufferStore":
            value, index = self.value(node.value), [self.value(i) for i in node.indices]
            if node.buffer in self.tensors:
                self.note(self.stores, node.buffer, index)
            elif "local" in str(node.buffer.scope()) and index == [0]:
                self.cells[node.buffer] = value
        elif kind == "Evaluate":
            self.value(node.value)


def children(node: Any) -> list[Any]:
    """The operands of an expression."""
    single = [getattr(node, name, None) for name in ("value", "condition", "true_value")]
    several = [*getattr(node, "args", ()), *getattr(node, "vectors", ())]
    found = [*single, getattr(node, "false_value", None), *several]
    return [x for x in found if hasattr(x, "ty") and type(x).__name__ != "StringImm"]


def execute(
    body: Any, known: dict[Any, int], tensors: dict[Any, str], data: dict[str, np.ndarray]
) -> list[Thread]:
    """All threads of the launches of a kernel, after they have run, one list for all of them."""
    threads: list[Thread] = []
    host = Thread(known, tensors, data)

    def launch(node: Any) -> None:
        axes = []
        while type(node).__name__ == "AttrStmt":
            if str(node.attr_key) == "thread_extent":
                axes.append((node.node.var, host.value(node.value)))
            node = node.body
        for place in itertools.product(*(range(extent) for _, extent in axes)):
            at = {var: i for (var, _), i in zip(axes, place, strict=True)}
            thread = Thread(host.known | at, tensors, data)
            thread.run(node)
            threads.append(thread)

    def walk(node: Any) -> None:
        kind = type(node).__name__
        if kind == "AttrStmt":
            launch(node)
        elif kind == "SeqStmt":
            for child in node.seq:
                walk(child)
        elif kind == "IfThenElse":
            case = node.then_case if host.value(node.condition) else node.else_case
            if case is not None:
                walk(case)
        else:
            host.run(node)

    walk(body)
    return threads
