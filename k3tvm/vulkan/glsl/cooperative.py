"""Turns calls named k3_coopmat_* into cooperative matrices (GL_KHR_cooperative_matrix).

They belong to a subgroup, all of whose threads must come along. The vocabulary in TIR, where all
matrices are 16 x 16, `a` and `b` float16, `c` float32, and constants i, j, k tell matrices of one
letter apart:
  call_extern("int32", "k3_coopmat_fill", "c", i, value)
  call_extern("int32", "k3_coopmat_load", "a", i, address_of(buffer[first]), stride, "row")
  call_extern("int32", "k3_coopmat_mma", i, j, k)                  c_i += a_j b_k
  call_extern("int32", "k3_coopmat_store", "c", i, address_of(buffer[first]), stride, "row")
`stride` is in elements, from row to row, or from column to column where the layout is "column".
Rows (columns) must begin at multiples of 16 bytes: `stride` and `first` are multiples of 8 (c: 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3tvm.vulkan.glsl.memory import only_index, pointer
from k3tvm.vulkan.glsl.types import UnsupportedError
from k3tvm.vulkan.glsl.writer import Memory, Writer, bare, expression

PREFIX = "k3_coopmat_"
TYPES = {
    "a": "coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>",
    "b": "coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>",
    "c": "coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>",
}
ELEMENT = {"a": "float16", "b": "float16", "c": "float32"}
LAYOUTS = {
    "row": "gl_CooperativeMatrixLayoutRowMajor",
    "column": "gl_CooperativeMatrixLayoutColumnMajor",
}


def cooperative(w: Writer, name: str, arguments: list[Any]) -> str:
    """The GLSL of one call; UnsupportedError for words outside the vocabulary."""
    word = name.removeprefix(PREFIX)
    if word not in WORDS:
        raise UnsupportedError(f"no cooperative matrix operation {name}")
    w.extensions.update({"GL_KHR_cooperative_matrix", "GL_KHR_memory_scope_semantics"})
    return WORDS[word](w, *arguments)


def _matrix(w: Writer, letter: Any, index: Any) -> str:
    """The variable of a matrix, declared at its first use."""
    use, number = str(getattr(letter, "value", letter)), getattr(index, "value", None)
    if use not in TYPES or number is None:
        raise UnsupportedError(f"no cooperative matrix {use} {index}: a, b or c and a constant")
    name = f"k3_{use}{int(number)}"
    w.matrices[name] = TYPES[use]
    return name


def _fill(w: Writer, letter: Any, index: Any, value: Any) -> str:
    name = _matrix(w, letter, index)
    return f"{name} = {w.matrices[name]}({expression(w, value)})"


def _load(w: Writer, letter: Any, index: Any, address: Any, stride: Any, layout: Any) -> str:
    place = _place(w, letter, address, stride, layout)
    return f"coopMatLoad({_matrix(w, letter, index)}, {place})"


def _store(w: Writer, letter: Any, index: Any, address: Any, stride: Any, layout: Any) -> str:
    place = _place(w, letter, address, stride, layout)
    return f"coopMatStore({_matrix(w, letter, index)}, {place})"


def _mma(w: Writer, c: Any, a: Any, b: Any) -> str:
    total, left, right = _matrix(w, "c", c), _matrix(w, "a", a), _matrix(w, "b", b)
    return f"{total} = coopMatMulAdd({left}, {right}, {total})"


def _place(w: Writer, letter: Any, address: Any, stride: Any, layout: Any) -> str:
    """The array, the first element, the stride and the layout, as GLSL wants them."""
    if type(address).__name__ != "Call" or not str(address.op.name).endswith("address_of"):
        raise UnsupportedError("a cooperative matrix is loaded and stored at address_of(...)")
    load, order = address.args[0], str(layout.value)
    memory = w.memory_of(load.source)
    if memory.dtype.base != ELEMENT.get(str(letter.value)) or memory.dtype.lanes != 1:
        raise UnsupportedError(f"a cooperative matrix {letter} in memory of {memory.dtype}")
    if order not in LAYOUTS:
        raise UnsupportedError(f"the layout {order!r} of a cooperative matrix")
    first, step = bare(expression(w, only_index(load.indices))), bare(expression(w, stride))
    return f"{_array(w, memory)}, uint({first}), uint({step}), {LAYOUTS[order]}"


def _array(w: Writer, memory: Memory) -> str:
    if memory.space == "shared":
        return memory.name
    if memory.space != "global":
        raise UnsupportedError(f"a cooperative matrix in {memory.space} memory")
    return f"{pointer(w, memory, memory.dtype)}.d"


WORDS: dict[str, Callable[..., str]] = {
    "fill": _fill,
    "load": _load,
    "mma": _mma,
    "store": _store,
}
