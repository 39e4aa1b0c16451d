"""Turns calls of TIR intrinsics and external functions into GLSL: one table row per function."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from k3tvm.vulkan.glsl.cooperative import PREFIX, cooperative
from k3tvm.vulkan.glsl.memory import only_index, place
from k3tvm.vulkan.glsl.reinterpret import reinterpret
from k3tvm.vulkan.glsl.types import DType, UnsupportedError, type_of
from k3tvm.vulkan.glsl.writer import Writer, bare, emits, expression

# Function of TIR or C -> built-in function of GLSL with the same meaning
BUILTIN = {
    "exp2": "exp2",
    "log2": "log2",
    "sqrt": "sqrt",
    "rsqrt": "inversesqrt",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "sinh": "sinh",
    "cosh": "cosh",
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "atan2": "atan",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "round": "roundEven",
    "nearbyint": "roundEven",
    "rint": "roundEven",
    "fabs": "abs",
    "abs": "abs",
    "fmax": "max",
    "fmin": "min",
    "max": "max",
    "min": "min",
    "fma": "fma",
}
# ... -> function of library.py
HELPER = {
    "exp": "k3_exp",
    "log": "k3_log",
    "pow": "k3_pow",
    "tanh": "k3_tanh",
    "erf": "k3_erf",
    "sigmoid": "k3_sigmoid",
    "isnan": "k3_isnan",
    "isinf": "k3_isinf",
    "fmod": "k3_tmod",
}
# Exact in 16 bits; everything else is computed in 32.
NARROW = frozenset(["floor", "ceil", "trunc", "roundEven", "abs", "max", "min", "fma"])
# GLSL has these in 64 bits
DOUBLE = NARROW | {"sqrt", "inversesqrt"}
SHUFFLE = {
    "tvm_warp_shuffle": ("subgroupShuffle", "shuffle"),
    "tvm_warp_shuffle_xor": ("subgroupShuffleXor", "shuffle"),
    "tvm_warp_shuffle_up": ("subgroupShuffleUp", "shuffle_relative"),
    "tvm_warp_shuffle_down": ("subgroupShuffleDown", "shuffle_relative"),
}
SUBGROUP_VALUES = frozenset(
    ["gl_SubgroupInvocationID", "gl_SubgroupID", "gl_NumSubgroups", "gl_SubgroupSize"]
)
SUBGROUP_KINDS = (
    (r"subgroup(Add|Mul|Min|Max|And|Or|Xor|(Inclusive|Exclusive)\w+)", "arithmetic"),
    (r"subgroupShuffle(Xor)?", "shuffle"),
    (r"subgroupShuffle(Up|Down)", "shuffle_relative"),
    (r"subgroup(Barrier|Elect)", "basic"),
)

CallEmitter = Callable[[Writer, Any], str]


@emits("Call")
def call(w: Writer, x: Any) -> str:
    """A call of an intrinsic, by its name without the dialect's prefix."""
    name = re.sub(r"^(tirx|prim|s_tir|ir)\.", "", str(getattr(x.op, "name", x.op)))
    if name in CALLS:
        return CALLS[name](w, x)
    return function(w, name, list(x.args), x)


def function(w: Writer, name: str, arguments: list[Any], x: Any) -> str:
    """A function of numbers."""
    if name in BUILTIN:
        return _numeric(w, BUILTIN[name], arguments, x)
    if name in HELPER:
        return _numeric(w, HELPER[name], arguments, x)
    raise UnsupportedError(f"no GLSL for the function {name}")


def _numeric(w: Writer, name: str, arguments: list[Any], x: Any) -> str:
    kind = type_of(arguments[0])
    texts = [expression(w, a) for a in arguments]
    if kind.base == "float64" and name not in DOUBLE:
        raise UnsupportedError(f"GLSL has no {name} of float64")
    if kind.base == "float16" and name not in NARROW:
        wide = DType("float32", kind.lanes)
        texts, kind = [f"{wide.glsl}({text})" for text in texts], wide
    if name.startswith("k3_"):
        w.helper(name, kind)
    result = f"{name}({', '.join(texts)})"
    narrowed = type_of(x).is_float and kind.base != type_of(x).base
    return f"{type_of(x).glsl}({result})" if narrowed else result


def external(w: Writer, x: Any) -> str:
    """call_extern: subgroup operations, and C's mathematics by name ("expf")."""
    name, arguments = str(x.args[0].value), list(x.args[1:])
    if name.startswith(PREFIX):
        return cooperative(w, name, arguments)
    if name in SUBGROUP_VALUES:
        w.extensions.add("GL_KHR_shader_subgroup_basic")
        return f"{type_of(x).glsl}({name})"
    if name.startswith("subgroup"):
        return _subgroup(w, name, [expression(w, a) for a in arguments])
    plain = name[:-1] if name.endswith("f") and name[:-1] in {**BUILTIN, **HELPER} else name
    return function(w, plain, arguments, x)


def _subgroup(w: Writer, name: str, arguments: list[str]) -> str:
    family = next((f for pattern, f in SUBGROUP_KINDS if re.fullmatch(pattern, name)), None)
    if family is None:
        raise UnsupportedError(f"no subgroup operation {name}")
    w.extensions.update({"GL_KHR_shader_subgroup_basic", f"GL_KHR_shader_subgroup_{family}"})
    if "shuffle" in family:
        arguments[1] = f"uint({arguments[1]})"
    return f"{name}({', '.join(arguments)})"


def warp_shuffle(w: Writer, x: Any) -> str:
    """TVM's shuffles: mask, value, lane or distance, ..."""
    name, _ = SHUFFLE[str(x.op.name).split(".")[-1]]
    return _subgroup(w, name, [expression(w, x.args[1]), expression(w, x.args[2])])


def if_then_else(w: Writer, x: Any) -> str:
    """Only the chosen value is evaluated."""
    condition = expression(w, x.args[0])
    with w.guarded():
        yes, no = expression(w, x.args[1]), expression(w, x.args[2])
    return f"({condition} ? {yes} : {no})"


def storage_sync(w: Writer, x: Any) -> str:
    """A barrier of the workgroup.

    GLSL's barrier() orders shared memory. Where threads also hand values to each other through
    device memory (`exchange.py`), its references are `coherent` and a memory barrier comes first.
    """
    scope = str(x.args[0].value)
    if scope == "warp":
        w.extensions.add("GL_KHR_shader_subgroup_basic")
        return "subgroupBarrier()"
    if scope not in ("shared", "shared.dyn"):
        raise UnsupportedError(f"a barrier of scope {scope!r}: Vulkan has none across workgroups")
    if w.device_barrier:
        w.line("memoryBarrierBuffer();")
    return "barrier()"


def atomic_add(w: Writer, x: Any) -> str:
    """Add to an integer in memory and give what it was; the address is address_of(buffer[i])."""
    kind, load = type_of(x), x.args[0].args[0]
    if kind.base not in ("int32", "uint32"):
        raise UnsupportedError(f"atomic_add of {kind}: Vulkan has it for 32-bit integers")
    target = place(w, w.memory_of(load.source), only_index(load.indices))
    return f"atomicAdd({target}, {bare(expression(w, x.args[1]))})"


def leading_zeros(w: Writer, x: Any) -> str:
    """The number of zero bits above the highest set bit; 32 for zero."""
    kind = type_of(x.args[0])
    if kind.scalar.size != 4:
        raise UnsupportedError(f"clz of {kind}: GLSL has it for 32 bits")
    bits = DType("uint32", kind.lanes).glsl
    return f"(31 - findMSB({bits}({expression(w, x.args[0])})))"


def copysign(w: Writer, x: Any) -> str:
    """The size of the first value with the sign of the second."""
    kind = type_of(x)
    if kind.base != "float32":
        raise UnsupportedError(f"copysign of {kind}")
    size, sign = (f"floatBitsToUint({expression(w, a)})" for a in x.args)
    return f"uintBitsToFloat(({size} & 0x7fffffffu) | ({sign} & 0x80000000u))"


def popcount(w: Writer, x: Any) -> str:
    """The number of set bits."""
    kind = type_of(x)
    if kind.size // kind.lanes != 4:
        raise UnsupportedError(f"popcount of {kind}: GLSL has it for 32 bits")
    return f"{kind.glsl}(bitCount({expression(w, x.args[0])}))"


CALLS: dict[str, CallEmitter] = {
    "call_extern": external,
    "call_pure_extern": external,
    "if_then_else": if_then_else,
    "reinterpret": lambda w, x: reinterpret(w, x.args[0], type_of(x)),
    "atomic_add": atomic_add,
    "break_loop": lambda w, x: "break",
    "clz": leading_zeros,
    "continue_loop": lambda w, x: "continue",
    "copysign": copysign,
    "likely": lambda w, x: expression(w, x.args[0]),
    "ctpop": popcount,
    "popcount": popcount,
    "thread_return": lambda w, x: "return",
    "tvm_storage_sync": storage_sync,
    "tvm_warp_activemask": lambda w, x: "0u",
    **dict.fromkeys(SHUFFLE, warp_shuffle),
}
