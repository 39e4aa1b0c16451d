"""Turns buffer reads and writes into GLSL: device memory by address, arrays, plain variables.

Device memory is reached through buffer references. A scalar is `A.d[i]`; vectors of 2 or 4 lanes
that provably begin at a multiple of their size are one access, others go lane by lane. Subscripts
are 32 bits wide in GLSL, so 64-bit indices become address arithmetic.
"""

from __future__ import annotations

from typing import Any

from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl.lanes import WIDTH
from k3tvm.vulkan.glsl.types import LANES, DType, UnsupportedError, type_of
from k3tvm.vulkan.glsl.writer import Memory, Writer, bare, emits, expression

WIDE = ("int64", "uint64")


@emits("TensorLoad", "BufferLoad")
def load(w: Writer, x: Any) -> str:
    """buffer[index], where a vector of indices gives a vector of elements."""
    memory, index = accessed(w, x.source, x.indices)
    kind = memory.dtype.with_lanes(memory.dtype.lanes * type_of(index).lanes)
    text = _read(w, memory, index, kind)
    return f"{kind.glsl}({text})" if kind.base == "bool" and memory.space == "global" else text


def _read(w: Writer, memory: Memory, index: Any, kind: DType) -> str:
    count = type_of(index).lanes
    if count == 1 or is_whole(w, memory, index):
        return place(w, memory, index)
    parts = ", ".join(place_of_lane(w, memory, index, i) for i in range(count))
    return f"{kind.stored.glsl if memory.space == 'global' else kind.glsl}({parts})"


def accessed(w: Writer, buffer: Any, indices: Any) -> tuple[Memory, Any]:
    """The memory of a buffer and its index; one of vectors has one vector at a time."""
    memory, index = w.memory_of(buffer), only_index(indices)
    if memory.dtype.lanes > 1 and type_of(index).lanes > 1:
        raise UnsupportedError(f"a vector of indices into {memory.name} of {memory.dtype}")
    return memory, index


def only_index(indices: Any) -> Any:
    """The index of a flat buffer."""
    if len(indices) != 1:
        raise UnsupportedError(f"a buffer with {len(indices)} indices; buffers must be flat")
    return indices[0]


def is_whole(w: Writer, memory: Memory, index: Any) -> bool:
    """Whether consecutive lanes in device memory begin at a multiple of the vector's size."""
    count = type_of(index).lanes
    consecutive = type(index).__name__ == "Ramp" and int(getattr(index.stride, "value", 0)) == 1
    if not consecutive or memory.space != "global" or memory.dtype.lanes > 1 or count not in (2, 4):
        return False
    return w.proves(lambda: tvm.tirx.floormod(index.base, count) == 0)


def place(w: Writer, memory: Memory, index: Any) -> str:
    """The l-value of one element, or of a whole vector of elements."""
    count = type_of(index).lanes
    base = index.base if count > 1 else index
    if memory.space == "variable":
        return memory.name
    text, wide = bare(expression(w, base)), type_of(base).base in WIDE
    if memory.space != "global":
        return f"{memory.name}[{f'int({text})' if wide else text}]"
    kind = memory.dtype.with_lanes(memory.dtype.lanes * count)
    if wide:
        offset = f"uint64_t({text}) * {memory.dtype.size}ul"
        return f"{w.reference(kind, memory.access)}(uint64_t({memory.name}) + {offset}).d[0]"
    whole = text if count == 1 else f"({text}) >> {count.bit_length() - 1}"
    return f"{pointer(w, memory, kind)}.d[{whole}]"


def pointer(w: Writer, memory: Memory, kind: DType) -> str:
    """The address of device memory as a reference to elements of this type."""
    if kind.stored == memory.holder:
        return memory.name
    return f"{w.reference(kind, memory.access)}({memory.name})"


def place_of_lane(w: Writer, memory: Memory, index: Any, lane: int) -> str:
    """The l-value of one lane of a vector access."""
    if type(index).__name__ == "Ramp":
        return place(w, memory, index.base + lane * index.stride)
    if type(index).__name__ == "Broadcast":
        return place(w, memory, index.value)
    vector = expression(w, index)
    wide = type_of(index).base in WIDE
    if memory.space == "global" and wide:
        raise UnsupportedError("vectors of 64-bit indices that are no ramp")
    array = f"{pointer(w, memory, memory.dtype)}.d" if memory.space == "global" else memory.name
    lane_text = f"({vector}).{LANES[lane]}"
    return f"{array}[{f'int({lane_text})' if wide else lane_text}]"


def store(w: Writer, statement: Any) -> None:
    """Write buffer[index] = value; all of a vector is computed before any of it is written."""
    memory, index = accessed(w, statement.buffer, statement.indices)
    if type_of(index).lanes <= WIDTH:
        _write(w, memory, index, _value(w, memory, statement.value), statement.value)
        return
    values = w.splitter.parts(statement.value)
    texts = [w.hoist(type_of(value), expression(w, value)) for value in values]
    for where, value, text in zip(w.splitter.parts(index), values, texts, strict=True):
        _write(w, memory, where, _stored(w, memory, text, value), value)


def _value(w: Writer, memory: Memory, value: Any) -> str:
    return _stored(w, memory, expression(w, value), value)


def _stored(w: Writer, memory: Memory, text: str, value: Any) -> str:
    kind = type_of(value)
    as_byte = kind.base == "bool" and memory.space == "global"
    return f"{kind.stored.glsl}({text})" if as_byte else text


def _write(w: Writer, memory: Memory, index: Any, text: str, value: Any) -> None:
    count, kind = type_of(index).lanes, type_of(value)
    if count == 1 or is_whole(w, memory, index):
        w.line(f"{place(w, memory, index)} = {bare(text)};")
        return
    kind = kind.stored if memory.space == "global" else kind
    vector = text if text.isidentifier() else w.hoist(kind, text)
    for lane in range(count):
        w.line(f"{place_of_lane(w, memory, index, lane)} = {vector}.{LANES[lane]};")
