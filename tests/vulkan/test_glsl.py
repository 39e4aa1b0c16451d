"""GLSL text of TIR: every row of the tables that has a trap in it, and every refusal (F29)."""

from __future__ import annotations

from typing import Any

import pytest

from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl import kernel
from k3tvm.vulkan.glsl.names import RESERVED, Names, identifier
from k3tvm.vulkan.glsl.types import UnsupportedError, dtype
from k3tvm.vulkan.glsl.writer import Memory, Writer, bare, expression

X = tvm.tirx
assert kernel.TABLES


def var(name: str, kind: str = "int32") -> Any:
    return X.Var(name, kind)


def imm(value: int, kind: str = "int32") -> Any:
    return X.IntImm(kind, value)


def real(value: float, kind: str = "float32") -> Any:
    return X.FloatImm(kind, value)


def call(kind: str, name: str, *arguments: Any) -> Any:
    return X.call_extern(kind, name, *arguments)


def reinterpret(source: str, to: str) -> Any:
    return X.reinterpret(to, var("v", source))


A, B, U, F, G = var("a"), var("b"), var("u", "uint32"), var("f", "float32"), var("g", "float32")
H, C, L = var("h", "float16"), var("c", "bool"), var("l", "int64")
LOCAL = X.decl_buffer((4,), "float32", "data", scope="local")
V4, W4, M4 = var("v", "float32x4"), var("w", "float32x4"), var("m", "boolx4")

EXPRESSIONS = {
    "least_int": (imm(-(2**31)), "(-2147483647 - 1)"),
    "least_long": (imm(-(2**63), "int64"), "(-9223372036854775807l - 1l)"),
    "negative": (imm(-5), "(-5)"),
    "uint": (imm(7, "uint32"), "7u"),
    "long": (imm(5, "int64"), "5l"),
    "byte": (imm(200, "uint8"), "uint8_t(200)"),
    "truth": (X.IntImm("bool", 1), "true"),
    "float": (real(0.1), "0.1"),
    "whole_float": (real(1e10), "1e+10"),
    "float_digits": (real(16777217.0), "1.6777216e+07"),
    "negative_zero": (real(-0.0), "(-0.0)"),
    "infinity": (real(float("inf")), "uintBitsToFloat(0x7f800000u)"),
    "minus_infinity": (real(float("-inf")), "uintBitsToFloat(0xff800000u)"),
    "nan": (real(float("nan")), "uintBitsToFloat(0x7fc00000u)"),
    "half_is_rounded": (real(0.1, "float16"), "float16_t(0.0999755859)"),
    "double": (real(0.1, "float64"), "0.1lf"),
    "unsigned_mod": (X.Mod(U, U), "(u % u)"),
    "truncated_mod": (X.Mod(A, B), "k3_tmod(a, b)"),
    "compare_vectors": (X.LT(V4, W4), "lessThan(v, w)"),
    "not_vector": (X.Not(M4), "not(m)"),
    "and_vectors": (X.And(M4, var("n", "boolx4")), "mix(bvec4(false), n, m)"),
    "or_vectors": (X.Or(M4, var("n", "boolx4")), "mix(n, bvec4(true), m)"),
    "select": (X.Select(C, F, G), "mix(g, f, c)"),
    "select_of_much": (X.Select(C, X.Div(F, G), G), "(c ? (f / g) : g)"),
    "branch": (X.if_then_else(C, F, G), "(c ? f : g)"),
    "cast": (X.Cast("int32", F), "int(f)"),
    "cast_vector": (X.Cast("float16x4", V4), "f16vec4(v)"),
    "ramp": (X.Ramp(A, imm(2), 2), "ivec2(a + 0 * 2, a + 1 * 2)"),
    "broadcast": (X.Broadcast(F, 4), "vec4(f)"),
    "shuffle": (X.Shuffle([V4], [imm(2)]), "v.z"),
    "half_in_float": (X.exp(H), "float16_t(k3_exp(float(h)))"),
    "half_floor": (X.floor(H), "floor(h)"),
    "extern_float": (call("float32", "tanhf", F), "k3_tanh(f)"),
    "round": (X.round(F), "roundEven(f)"),
    "isnan": (X.isnan(F), "k3_isnan(f)"),
    "isnan_half": (X.isnan(H), "k3_isnan(float(h))"),
    "popcount": (X.popcount(U), "uint(bitCount(u))"),
    "clz": (X.clz(A), "(31 - findMSB(uint(a)))"),
    "copysign": (
        X.copysign(F, G),
        "uintBitsToFloat((floatBitsToUint(f) & 0x7fffffffu) | (floatBitsToUint(g) & 0x80000000u))",
    ),
    "subgroup_sum": (call("float32", "subgroupAdd", F), "subgroupAdd(f)"),
    "subgroup_shuffle": (
        call("float32", "subgroupShuffleXor", F, A),
        "subgroupShuffleXor(f, uint(a))",
    ),
    "subgroup_value": (call("int32", "gl_SubgroupID"), "int(gl_SubgroupID)"),
    "bits": (reinterpret("float32", "uint32"), "floatBitsToUint(v)"),
    "sign": (reinterpret("uint32", "int32"), "int(v)"),
    "halves": (reinterpret("uint32", "float16x2"), "unpackFloat2x16(v)"),
    "from_halves": (reinterpret("float16x2", "uint32"), "packFloat2x16(v)"),
    "bytes": (reinterpret("uint32", "uint8x4"), "unpack8(v)"),
    "from_bytes": (reinterpret("uint8x4", "uint32"), "pack32(v.xyzw)"),
    "signed_bytes": (reinterpret("uint32", "int8x4"), "i8vec4(unpack8(v))"),
    "shorts": (reinterpret("uint16x2", "uint32"), "pack32(v.xy)"),
    "words": (reinterpret("uint64", "uint32x2"), "unpack32(v)"),
    "from_words": (reinterpret("uint32x2", "uint64"), "pack64(v.xy)"),
    "double_bits": (reinterpret("float64", "uint64"), "doubleBitsToUint64(v)"),
    "four_halves": (
        reinterpret("uint32x2", "float16x4"),
        "uint16BitsToFloat16(u16vec4(unpack16(v.x), unpack16(v.y)))",
    ),
    "to_words": (
        reinterpret("float16x4", "uint32x2"),
        "uvec2(pack32(t.xy), pack32(t.zw))",
    ),
    "bytes_to_float": (reinterpret("uint8x4", "float32"), "uintBitsToFloat(pack32(v.xyzw))"),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression(name):
    node, text = EXPRESSIONS[name]
    assert expression(Writer(), node) == text


REFUSED = {
    "double_exp": (X.exp(var("d", "float64")), "exp of float64"),
    "bfloat16": (X.Cast("float32", var("v", "bfloat16")), "bfloat16"),
    "extern": (call("float32", "unheard_of", F), "unheard_of"),
    "subgroup": (call("float32", "subgroupQuadSwap", F), "subgroupQuadSwap"),
    "popcount": (X.popcount(L), "popcount of int64"),
    "atomic": (X.call_intrin("float32", "tirx.atomic_add", X.address_of(LOCAL[0]), F), "float32"),
    "undeclared": (LOCAL[0], "data was not declared"),
    "kind": (X.FloorDiv(A, B), "FloorDiv"),
    "lanes": (X.Broadcast(F, 8), "8 lanes"),
    "string": (tvm.ir.StringImm("word"), "word"),
    "grid_barrier": (X.call_intrin("int32", "tirx.tvm_storage_sync", "global"), "global"),
    "matrix_word": (call("int32", "k3_coopmat_turn", "c"), "k3_coopmat_turn"),
    "matrix_letter": (call("int32", "k3_coopmat_fill", "d", 0, F), "matrix d"),
    "matrix_index": (call("int32", "k3_coopmat_fill", "c", A, F), "constant"),
    "matrix_address": (call("int32", "k3_coopmat_load", "a", 0, A, 16, "row"), "address_of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_what_is_missing(name):
    node, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        expression(Writer(), node)


def test_let_becomes_a_variable_once():
    w = Writer()
    t = var("t", "float32")
    text = expression(w, X.Let(t, F * G, t * t))
    assert w.lines == ["  float t = f * g;"]
    assert text == "(t * t)"


def test_let_that_loads_stays_behind_its_guard():
    """Hoisted, the load would happen where the guard forbids it."""
    w = Writer()
    w.memory[LOCAL] = Memory("local", "data", dtype("float32"))
    t = var("t", "float32")
    guarded = X.if_then_else(C, X.Let(t, LOCAL[A], t * t), F)
    assert expression(w, guarded) == "(c ? ((data[a]) * (data[a])) : f)"
    assert w.lines == []


@pytest.mark.parametrize("word", ["sample", "float16_t", "gl_x", "a__b", "3d", "k3_exp", "", "_"])
def test_names_are_legal(word):
    name = Names().fresh(word)
    assert name.isidentifier()
    assert name not in RESERVED
    assert "__" not in name
    assert not name.startswith(("gl_", "k3_", "R_", "In_", "At_"))


def test_names_are_unique():
    """Two variables of one name, one of which is called as the other's replacement."""
    names = Names()
    given = [names.of(var(n)) for n in ("i", "i", "i_1", "i", "in", "in_1")]
    assert len(set(given)) == len(given)
    assert identifier("buffer_ptr") == "buffer_ptr"


@pytest.mark.parametrize(
    ("text", "want"), [("(a + b)", "a + b"), ("(a) + (b)", "(a) + (b)"), ("a", "a")]
)
def test_bare_only_drops_parentheses_around_all(text, want):
    assert bare(text) == want


def test_division_of_what_cannot_be_negative_is_plain():
    w = Writer()
    w.analyzer.bind(A, tvm.ir.Range.from_min_extent(0, 64))
    assert expression(w, X.Mod(A, imm(7))) == "(a % 7)"
