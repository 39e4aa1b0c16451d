"""Turns TIR vectors of more than four lanes into several of four, lane by lane operations only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl.types import DType, UnsupportedError, type_of

WIDTH = 4
# Kinds with operands `a` and `b` that work lane by lane
NAMES = """
Add Sub Mul Div Mod FloorDiv FloorMod Min Max BitwiseAnd BitwiseOr BitwiseXor LShift RShift EQ
NE LT LE GT GE And Or
"""
OPERATORS = frozenset(NAMES.split())


def chunks(lanes: int) -> list[tuple[int, int]]:
    """(first lane, lanes) of the parts of a vector."""
    return [(first, min(WIDTH, lanes - first)) for first in range(0, lanes, WIDTH)]


@dataclass(frozen=True)
class Splitter:
    """Takes vector expressions apart. variables: wide variables -> the variables of their parts."""

    variables: dict[Any, list[Any]] = field(default_factory=dict)

    def parts(self, node: Any) -> list[Any]:
        """An expression of many lanes as expressions of at most four."""
        return [self.part(node, *chunk) for chunk in chunks(type_of(node).lanes)]

    def part(self, node: Any, first: int, count: int) -> Any:
        """Lanes first .. first + count of a vector; UnsupportedError if they interact."""
        lanes = type_of(node).lanes
        if lanes == 1 or (first, count) == (0, lanes):
            return node
        kind = type(node).__name__
        if kind in OPERATORS:
            return type(node)(self.part(node.a, first, count), self.part(node.b, first, count))
        if kind not in PARTS:
            raise UnsupportedError(f"{kind} of {lanes} lanes: GLSL vectors have four")
        return PARTS[kind](self, node, first, count)


def _ramp(s: Splitter, node: Any, first: int, count: int) -> Any:
    base = node.base + first * node.stride if first else node.base
    return tvm.tirx.Ramp(base, node.stride, count) if count > 1 else base


def _broadcast(s: Splitter, node: Any, first: int, count: int) -> Any:
    return tvm.tirx.Broadcast(node.value, count) if count > 1 else node.value


def _cast(s: Splitter, node: Any, first: int, count: int) -> Any:
    kind = type_of(node).with_lanes(count)
    return tvm.tirx.Cast(str(kind), s.part(node.value, first, count))


def _select(s: Splitter, node: Any, first: int, count: int) -> Any:
    values = (s.part(v, first, count) for v in (node.true_value, node.false_value))
    return tvm.tirx.Select(s.part(node.condition, first, count), *values)


def _load(s: Splitter, node: Any, first: int, count: int) -> Any:
    return node.source.vload([s.part(node.indices[0], first, count)])


def _call(s: Splitter, node: Any, first: int, count: int) -> Any:
    kind = type_of(node)
    arguments = [_argument(s, a, kind, first, count) for a in node.args]
    result = tvm.ir.PrimType(str(kind.with_lanes(count)))
    return tvm.ir.Call(node.op, arguments, attrs=node.attrs, ret_ty=result)


def _argument(s: Splitter, node: Any, kind: DType, first: int, count: int) -> Any:
    """The lanes of an argument that belong to lanes of the result, whose widths may differ."""
    if type(node).__name__ == "StringImm" or type_of(node).lanes == 1:
        return node
    have, bits = type_of(node), kind.scalar.size
    if have.lanes == kind.lanes:
        return s.part(node, first, count)
    if first * bits % have.scalar.size or count * bits % have.scalar.size:
        raise UnsupportedError(f"{have} as {kind}: GLSL vectors have four lanes")
    return s.part(node, first * bits // have.scalar.size, count * bits // have.scalar.size)


def _let(s: Splitter, node: Any, first: int, count: int) -> Any:
    return tvm.tirx.Let(node.var, node.value, s.part(node.body, first, count))


def _variable(s: Splitter, node: Any, first: int, count: int) -> Any:
    if node not in s.variables or first % WIDTH:
        raise UnsupportedError(f"lanes {first} to {first + count} of the variable {node.name}")
    return s.part(s.variables[node][first // WIDTH], 0, count)


PARTS: dict[str, Callable[[Splitter, Any, int, int], Any]] = {
    "Ramp": _ramp,
    "Broadcast": _broadcast,
    "Cast": _cast,
    "Select": _select,
    "TensorLoad": _load,
    "Call": _call,
    "Let": _let,
    "Var": _variable,
    "Not": lambda s, node, first, count: type(node)(s.part(node.a, first, count)),
    "BitwiseNot": lambda s, node, first, count: type(node)(s.part(node.a, first, count)),
}
