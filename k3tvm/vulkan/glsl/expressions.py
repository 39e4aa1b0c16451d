"""Turns TIR expressions other than calls and loads into GLSL: one table row per kind of node."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from k3tvm.vulkan.glsl.access import loads
from k3tvm.vulkan.glsl.types import LANES, DType, UnsupportedError, type_of
from k3tvm.vulkan.glsl.writer import Emitter, Writer, bare, emits, expression

COMPARE = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!="}
COMPARE_VECTORS = {
    "LT": "lessThan",
    "LE": "lessThanEqual",
    "GT": "greaterThan",
    "GE": "greaterThanEqual",
    "EQ": "equal",
    "NE": "notEqual",
}
ARITHMETIC = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "Div": "/",
    "BitwiseAnd": "&",
    "BitwiseOr": "|",
    "BitwiseXor": "^",
    "LShift": "<<",
    "RShift": ">>",
}


def _binary(symbol: str) -> Emitter:
    def emit(w: Writer, x: Any) -> str:
        return f"({expression(w, x.a)} {symbol} {expression(w, x.b)})"

    return emit


for _kind, _symbol in ARITHMETIC.items():
    emits(_kind)(_binary(_symbol))


@emits(*COMPARE)
def compare(w: Writer, x: Any) -> str:
    """a < b and its kin; vectors compare lane by lane through functions."""
    kind = type(x).__name__
    a, b = expression(w, x.a), expression(w, x.b)
    if type_of(x.a).lanes > 1:
        return f"{COMPARE_VECTORS[kind]}({a}, {b})"
    return f"({a} {COMPARE[kind]} {b})"


@emits("And", "Or")
def logical(w: Writer, x: Any) -> str:
    """The second operand is only evaluated if the first leaves the question open."""
    is_and = type(x).__name__ == "And"
    first = expression(w, x.a)
    with w.guarded():
        second = expression(w, x.b)
    kind = type_of(x)
    if kind.lanes == 1:
        return f"({first} {'&&' if is_and else '||'} {second})"
    if is_and:
        return f"mix({kind.glsl}(false), {second}, {first})"
    return f"mix({second}, {kind.glsl}(true), {first})"


@emits("Not")
def logical_not(w: Writer, x: Any) -> str:
    """!a, or not(a) of vectors."""
    value = expression(w, x.a)
    return f"not({value})" if type_of(x).lanes > 1 else f"(!{value})"


@emits("BitwiseNot")
def bitwise_not(w: Writer, x: Any) -> str:
    """~a."""
    return f"(~{expression(w, x.a)})"


@emits("Max", "Min")
def extremum(w: Writer, x: Any) -> str:
    """max and min; which operand is chosen when one is NaN is up to the driver."""
    return f"{type(x).__name__.lower()}({expression(w, x.a)}, {expression(w, x.b)})"


@emits("Mod")
def truncated_mod(w: Writer, x: Any) -> str:
    """The remainder with the sign of the dividend; GLSL leaves % undefined below zero.

    Division and remainder rounded down do not arrive here: TVM spells them with these two.
    """
    kind, a, b = type_of(x), expression(w, x.a), expression(w, x.b)
    if kind.is_unsigned or (_not_negative(w, x.a) and _not_negative(w, x.b)):
        return f"({a} % {b})"
    return f"{w.helper('k3_tmod', kind)}({a}, {b})"


def _not_negative(w: Writer, node: Any) -> bool:
    return not type_of(node).is_float and w.proves(lambda: node >= 0)


@emits("Var")
def variable(w: Writer, x: Any) -> str:
    """A name."""
    return w.names.of(x)


@emits("IntImm")
def int_literal(w: Writer, x: Any) -> str:
    """An integer or bool constant."""
    return integer(int(x.value), type_of(x))


def integer(value: int, kind: DType) -> str:
    """The literal of an integer of this type; the least one has no literal of its own in GLSL."""
    suffix = {"int32": "", "uint32": "u", "int64": "l", "uint64": "ul"}.get(kind.base)
    if kind.base == "bool":
        return "true" if value else "false"
    if suffix is None:
        return f"{kind.glsl}({value})"
    if kind.is_unsigned:
        return f"{value % (1 << 8 * kind.size)}{suffix}"
    if value == -(1 << 8 * kind.size - 1):
        return f"({value + 1}{suffix} - 1{suffix})"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"


@emits("FloatImm")
def float_literal(w: Writer, x: Any) -> str:
    """A floating point constant, exact; infinities and NaN by their bits."""
    return floating(float(x.value), type_of(x))


def floating(value: float, kind: DType) -> str:
    """The literal of a float of this type, rounded here: glslang cuts float16 constants off."""
    if kind.base == "float64":
        return _double(value)
    with np.errstate(over="ignore"):
        value = float(np.dtype(kind.base).type(value))
    if math.isfinite(value):
        digits = str(np.float32(value)) if kind.base == "float32" else f"{value:.9g}"
        text = digits if any(c in digits for c in ".e") else f"{digits}.0"
    else:
        text = f"uintBitsToFloat(0x{_float_bits(value):08x}u)"
    text = f"({text})" if text.startswith("-") else text
    return f"float16_t({text})" if kind.base == "float16" else text


def _float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _double(value: float) -> str:
    if math.isfinite(value):
        return f"({value!r}lf)" if math.copysign(1.0, value) < 0 else f"{value!r}lf"
    bits = struct.unpack("<Q", struct.pack("<d", value))[0]
    return f"uint64BitsToDouble(0x{bits:016x}ul)"


@emits("Cast")
def cast(w: Writer, x: Any) -> str:
    """A conversion; floats to integers cut the fraction off."""
    source = type_of(x.value)
    text = bare(expression(w, x.value))
    return text if source == type_of(x) else f"{type_of(x).glsl}({text})"


@emits("Select")
def select(w: Writer, x: Any) -> str:
    """Both values may be evaluated; without loads that is an instruction instead of a branch."""
    condition = expression(w, x.condition)
    with w.guarded():
        yes, no = expression(w, x.true_value), expression(w, x.false_value)
    if type_of(x.condition).lanes > 1 or _is_cheap(yes) and _is_cheap(no):
        return f"mix({no}, {yes}, {condition})"
    return f"({condition} ? {yes} : {no})"


def _is_cheap(text: str) -> bool:
    """A name or a literal: nothing is lost by evaluating it."""
    return len(text) < 24 and "[" not in text and "/" not in text


@emits("Broadcast")
def broadcast(w: Writer, x: Any) -> str:
    """One value in all lanes."""
    return f"{type_of(x).glsl}({expression(w, x.value)})"


@emits("Ramp")
def ramp(w: Writer, x: Any) -> str:
    """base, base + stride, ..."""
    kind, base, stride = type_of(x), expression(w, x.base), expression(w, x.stride)
    lanes = ", ".join(f"{base} + {integer(i, kind.scalar)} * {stride}" for i in range(kind.lanes))
    return f"{kind.glsl}({lanes})"


@emits("Shuffle")
def shuffle(w: Writer, x: Any) -> str:
    """Chosen lanes of several vectors."""
    lanes: list[str] = []
    for vector in (p for v in x.vectors for p in w.splitter.parts(v)):
        kind = type_of(vector)
        text = expression(w, vector)
        if kind.lanes > 1 and not text.isidentifier() and not w.is_guarded:
            text = w.hoist(kind, text)
        lanes += [f"{text}.{LANES[i]}" for i in range(kind.lanes)] if kind.lanes > 1 else [text]
    chosen = [lanes[int(i)] for i in x.indices]
    return chosen[0] if len(chosen) == 1 else f"{type_of(x).glsl}({', '.join(chosen)})"


@emits("Let")
def let(w: Writer, x: Any) -> str:
    """A value with a name: a variable before the statement, unless it must stay guarded.

    A guarded value may load what lies outside a buffer when the guard fails; it is put into the
    place of the variable instead.
    """
    text = expression(w, x.value)
    if text.isidentifier() or (w.is_guarded and loads(x.value)):
        w.names.set(x.var, text if text.isidentifier() else f"({text})")
    else:
        kind = type_of(x.value)
        w.names.set(x.var, w.hoist(kind, text, str(x.var.name) or "t"))
    return expression(w, x.body)


@emits("StringImm")
def string(w: Writer, x: Any) -> str:
    """Strings only name things; as values they have no place in a kernel."""
    raise UnsupportedError(f"a string as a value: {x.value!r}")
