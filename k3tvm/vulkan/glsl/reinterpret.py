"""Turns a reinterpretation of bits into GLSL: to unsigned integers, regrouped, and back."""

from __future__ import annotations

from typing import Any

from k3tvm.vulkan.glsl.types import LANES, DType, UnsupportedError, type_of
from k3tvm.vulkan.glsl.writer import Writer, expression

TO_BITS = {
    "float16": "float16BitsToUint16",
    "float32": "floatBitsToUint",
    "float64": "doubleBitsToUint64",
}
FROM_BITS = {
    "float16": "uint16BitsToFloat16",
    "float32": "uintBitsToFloat",
    "float64": "uint64BitsToDouble",
}
# (bits of a part, bits of the whole): the functions that GL_EXT_shader_explicit_arithmetic_types
# has to join parts and to take a whole apart
GROUPS = {(8, 16), (8, 32), (16, 32), (16, 64), (32, 64)}


def reinterpret(w: Writer, node: Any, to: DType) -> str:
    """The value of `node` with its bits read as `to`."""
    kind, text = type_of(node), expression(w, node)
    if kind == to:
        return text
    if kind.size != to.size or "bool" in (kind.base, to.base):
        raise UnsupportedError(f"reinterpret {kind} as {to}")
    if (kind.base, to.base, kind.lanes) in DIRECT:
        return f"{DIRECT[kind.base, to.base, kind.lanes]}({text})"
    bits, raw = _to_bits(text, kind)
    raw = regroup(w, raw, bits, _unsigned(to))
    return _from_bits(raw, to)


DIRECT = {
    ("uint32", "float16", 1): "unpackFloat2x16",
    ("float16", "uint32", 2): "packFloat2x16",
    ("int32", "float32", 1): "intBitsToFloat",
    ("float32", "int32", 1): "floatBitsToInt",
}


def _unsigned(kind: DType) -> DType:
    return DType(f"uint{8 * kind.scalar.size}", kind.lanes)


def _to_bits(text: str, kind: DType) -> tuple[DType, str]:
    bits = _unsigned(kind)
    if kind.is_unsigned:
        return bits, text
    return bits, f"{TO_BITS.get(kind.base, bits.glsl)}({text})"


def _from_bits(text: str, to: DType) -> str:
    return text if to.is_unsigned else f"{FROM_BITS.get(to.base, to.glsl)}({text})"


def regroup(w: Writer, text: str, kind: DType, to: DType) -> str:
    """Unsigned integers of one width as unsigned integers of another."""
    if kind.base == to.base:
        return text
    part, whole = sorted((8 * kind.scalar.size, 8 * to.scalar.size))
    count = whole // part
    if (part, whole) not in GROUPS:
        middle = DType("uint16", 0) if part == 8 else DType("uint32", 0)
        step = middle.with_lanes(kind.size // middle.scalar.size)
        return regroup(w, regroup(w, text, kind, step), step, to)
    if kind.lanes > 1 and not text.isidentifier() and not w.is_guarded:
        text = w.hoist(kind, text)
    if kind.scalar.size < to.scalar.size:
        return _join(text, kind, to, f"pack{whole}", count)
    parts = [text] if kind.lanes == 1 else [f"{text}.{LANES[i]}" for i in range(kind.lanes)]
    unpacked = [f"unpack{part}({p})" for p in parts]
    return unpacked[0] if len(unpacked) == 1 else f"{to.glsl}({', '.join(unpacked)})"


def _join(text: str, kind: DType, to: DType, function: str, count: int) -> str:
    groups = ["".join(LANES[g * count : (g + 1) * count]) for g in range(to.lanes)]
    packed = [f"{function}({text}.{g})" for g in groups]
    return packed[0] if len(packed) == 1 else f"{to.glsl}({', '.join(packed)})"
