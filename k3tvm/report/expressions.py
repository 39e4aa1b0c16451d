"""TIR expressions become integers (`values`), and what their evaluation loads and computes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from k3tvm.report.effects import EFFECTS, WARP
from k3tvm.report.state import State, Tensor
from k3tvm.report.values import (
    UNKNOWN,
    Data,
    Ramp,
    combine,
    divided,
    floor_divided,
    floor_remainder,
    is_known,
    lanes_of,
    reduced,
    remainder,
)

Evaluator = Callable[[State, Any], Any]

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": divided,
    "Mod": remainder,
    "FloorDiv": floor_divided,
    "FloorMod": floor_remainder,
    "Min": np.minimum,
    "Max": np.maximum,
    "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def evaluate(s: State, node: Any) -> Any:
    """The value of an expression; what it loads and computes is noted."""
    kind = type(node).__name__
    found = EXPRESSIONS.get(kind)
    if found is None:
        s.note(f"expressions of kind {kind}")
        return UNKNOWN
    return found(s, node)


def kind_of(node: Any) -> tuple[int, bool]:
    """Lanes of an expression, and whether it is a float."""
    base, _, lanes = str(node.ty).partition("x")
    return int(lanes or 1), "float" in base


def _data(node: Any) -> Data:
    return Data(*kind_of(node))


def _binary(s: State, node: Any) -> Any:
    a, b = evaluate(s, node.a), evaluate(s, node.b)
    kind = type(node).__name__
    if isinstance(a, Data) or isinstance(b, Data):
        if all(is_known(v) or isinstance(v, Data) and v.index for v in (a, b)):
            return combine(BINARY[kind], a, b)
        lanes = max(lanes_of(a), lanes_of(b))
        real = isinstance(a, Data) and a.real or isinstance(b, Data) and b.real
        s.count("flops" if real else "integers", lanes)
        return Data(lanes, real)
    if isinstance(a, Ramp) or isinstance(b, Ramp):
        return _moved(a, b) if kind == "Add" else Data(max(lanes_of(a), lanes_of(b)))
    value = combine(BINARY[kind], a, b)
    return _reduced(value) if kind in NARROWING else value


NARROWING = ("Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max", "BitwiseAnd", "RShift")
SMALL = 1 << 16  # elements that are worth a look


def _reduced(value: Any) -> Any:
    """The value without axes that an operation such as a remainder has made meaningless."""
    return reduced(value) if isinstance(value, np.ndarray) and value.size <= SMALL else value


def _moved(a: Any, b: Any) -> Any:
    """The sum of a ramp and a value that is the same in all lanes."""
    if isinstance(a, Ramp) and isinstance(b, Ramp):
        return Data(a.lanes)
    ramp, other = (a, b) if isinstance(a, Ramp) else (b, a)
    return Ramp(combine(BINARY["Add"], ramp.start, other), ramp.lanes)


def _compare(s: State, node: Any) -> Any:
    value = combine(COMPARE[type(node).__name__], evaluate(s, node.a), evaluate(s, node.b))
    return _reduced(value)


def _and(s: State, node: Any) -> Any:
    first = evaluate(s, node.a)
    with s.where([first]):
        second = evaluate(s, node.b)
    return combine(operator.and_, first, second)


def _or(s: State, node: Any) -> Any:
    first = evaluate(s, node.a)
    with s.where([negated(first)]):
        second = evaluate(s, node.b)
    return combine(operator.or_, first, second)


def negated(condition: Any) -> Any:
    """Where it does not hold."""
    return combine(np.logical_not, condition)


def _select(s: State, node: Any) -> Any:
    return _chosen(s, node.condition, node.true_value, node.false_value)


def _chosen(s: State, condition: Any, yes: Any, no: Any) -> Any:
    """One of two values; only what is chosen is loaded."""
    c = evaluate(s, condition)
    with s.where([c]):
        a = evaluate(s, yes)
    with s.where([negated(c)]):
        b = evaluate(s, no)
    if isinstance(a, Data) or isinstance(b, Data):
        return a if isinstance(a, Data) else b
    return combine(np.where, c, a, b)


def _cast(s: State, node: Any) -> Any:
    value = evaluate(s, node.value)
    if isinstance(value, Data) and not value.index:
        return _data(node)
    lanes, real = kind_of(node)
    return Data(lanes, True) if real else value


def _variable(s: State, node: Any) -> Any:
    return s.variables.get(node, UNKNOWN)


def _load(s: State, node: Any) -> Any:
    index = [evaluate(s, i) for i in node.indices]
    return load(s, node.source, index, lambda: _data(node))


def load(s: State, buffer: Any, index: list[Any], data: Callable[[], Data]) -> Any:
    """A load from device memory is noted; integers that are followed are found again."""
    tensor = s.tensors.get(buffer)
    if tensor is not None:
        return _load_tensor(s, tensor, index)
    if buffer in s.cells:
        return s.read_cell(s.cells[buffer], index[0])
    if buffer in s.shared:
        return s.read_shared(s.shared[buffer], index[0])
    return data()


def split_index(index: list[Any]) -> tuple[list[Any], int]:
    """The index of the first element, and how many there are."""
    last = index[-1]
    if isinstance(last, Ramp):
        return [*index[:-1], last.start], last.lanes
    return index, lanes_of(last)


def _load_tensor(s: State, tensor: Tensor, index: list[Any]) -> Any:
    first, lanes = split_index(index)
    s.access(tensor, False, lanes, first)
    if tensor.data is None or lanes > 1:
        return Data(lanes, tensor.real)
    data = tensor.data
    if tensor.lost:
        return UNKNOWN

    def gather(*at: Any) -> Any:
        return data[tuple(np.clip(i, 0, n - 1) for i, n in zip(at, data.shape, strict=True))]

    value = combine(gather, *first)
    if is_known(value):
        return reduced(value)
    part = data[tuple(i if isinstance(i, int) else slice(None) for i in first)]
    return Data(least=int(part.min()), most=int(part.max()))


def _ramp(s: State, node: Any) -> Any:
    start, stride = evaluate(s, node.base), evaluate(s, node.stride)
    lanes = int(node.lanes)
    return Ramp(start, lanes) if isinstance(stride, int) and stride == 1 else Data(lanes)


def _broadcast(s: State, node: Any) -> Any:
    evaluate(s, node.value)
    return _data(node)


def _shuffle(s: State, node: Any) -> Any:
    values = [evaluate(s, v) for v in node.vectors]
    real = any(isinstance(v, Data) and v.real for v in values)
    return Data(len(node.indices), real)


def _let(s: State, node: Any) -> Any:
    s.variables[node.var] = evaluate(s, node.value)
    return evaluate(s, node.body)


def _call(s: State, node: Any) -> Any:
    name = str(node.op.name).removeprefix("tirx.")
    if name in ("call_extern", "call_pure_extern"):
        return _extern(s, node, str(node.args[0].value), list(node.args[1:]))
    if name == "if_then_else":
        return _chosen(s, *node.args)
    if name in SILENT:
        return UNKNOWN
    if name in MATRIX:
        s.count("matrix", MATRIX[name])
    values = [evaluate(s, a) for a in node.args]
    if name == "reinterpret":
        return _data(node)
    if name in BITWISE:
        return combine(BINARY[BITWISE[name]], *values)
    lanes, real = kind_of(node)
    if real:
        s.count("flops", lanes)
    return Data(lanes, real)


SILENT = ("tvm_storage_sync", "address_of", "tvm_access_ptr")
MATRIX = {"simdgroup_multiply_accumulate": 2 * 8 * 8 * 8 // WARP}
BITWISE = {
    "bitwise_and": "BitwiseAnd",
    "bitwise_or": "BitwiseOr",
    "bitwise_xor": "BitwiseXor",
    "shift_left": "LShift",
    "shift_right": "RShift",
}


def _extern(s: State, node: Any, name: str, args: list[Any]) -> Any:
    """A named device function, by its row in `effects`; pointers are not followed any further."""
    if name in ("gl_NumSubgroups", "gl_SubgroupID"):
        number = combine(floor_divided, s.thread, WARP)
        return -(-s.threads // WARP) if name == "gl_NumSubgroups" else _reduced(number)
    effect = EFFECTS.get(name)
    pointers: dict[int, tuple[Any, list[Any]]] = {}
    for i, a in enumerate(args):
        target = _pointed(a)
        if target is None:
            evaluate(s, a)
        else:
            pointers[i] = (target.source, [evaluate(s, j) for j in target.indices])
    lanes, real = kind_of(node)
    if effect is None:
        if name.startswith("k3_") or any(b in s.tensors for b, _ in pointers.values()):
            s.note(f"the function {name}")
        s.count("flops" if real else "integers", lanes)
        return Data(lanes, real)
    for written, uses in ((False, effect.reads), (True, effect.writes)):
        for i, nbytes in uses:
            _through(s, *pointers.get(i, (None, [])), written, nbytes)
    for kind, amount in (
        ("matrix", effect.matrix),
        ("flops", effect.flops),
        ("integers", effect.integers),
    ):
        if amount:
            s.count(kind, amount)
    return Data(lanes, real)


def _pointed(node: Any) -> Any:
    """The element that an expression is the address of."""
    if type(node).__name__ == "Call" and str(node.op.name) == "tirx.address_of":
        return node.args[0]
    return None


def _through(s: State, buffer: Any, index: list[Any], written: bool, nbytes: int) -> None:
    tensor = s.tensors.get(buffer)
    if tensor is not None:
        s.access(tensor, written, nbytes // tensor.bytes, index)


EXPRESSIONS: dict[str, Evaluator] = {
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(COMPARE, _compare),
    "And": _and,
    "Or": _or,
    "Not": lambda s, node: negated(evaluate(s, node.a)),
    "BitwiseNot": lambda s, node: combine(np.invert, evaluate(s, node.a)),
    "Select": _select,
    "Cast": _cast,
    "Var": _variable,
    "IntImm": lambda s, node: int(node.value),
    "FloatImm": lambda s, node: Data(1, True),
    "StringImm": lambda s, node: UNKNOWN,
    "TensorLoad": _load,
    "BufferLoad": _load,
    "Ramp": _ramp,
    "Broadcast": _broadcast,
    "Shuffle": _shuffle,
    "Let": _let,
    "Call": _call,
}
