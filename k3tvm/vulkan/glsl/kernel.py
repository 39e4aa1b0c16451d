"""Turns one lowered TIR device function into a GLSL 4.60 compute shader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl import calls, expressions, memory
from k3tvm.vulkan.glsl.library import definition
from k3tvm.vulkan.glsl.statements import statement
from k3tvm.vulkan.glsl.types import ELEMENTS, DType, UnsupportedError, dtype, type_of
from k3tvm.vulkan.glsl.usage import Usage, usage
from k3tvm.vulkan.glsl.writer import Memory, Writer

# The modules whose tables `writer.expression` reads; importing them fills it.
TABLES = (calls, expressions, memory)
TAGS = tuple(f"{axis}.{d}" for axis in ("blockIdx", "threadIdx") for d in "xyz")
EXTENSIONS = (
    "GL_EXT_buffer_reference",
    "GL_EXT_control_flow_attributes",
    "GL_EXT_scalar_block_layout",
    "GL_EXT_shader_explicit_arithmetic_types",
)
BLOCK_EXTENSIONS = ("GL_EXT_buffer_reference_uvec2",)


@dataclass(frozen=True)
class Shader:
    """GLSL text, and what a launch has to know.

    kinds: one letter per parameter (`module.KernelInfo`). block: arguments travel in a block of
    memory whose address is pushed. tags: launch parameters as indices into TAGS. local_size: the
    workgroup. grid: workgroups, where the kernel says how many, else 0. shared_bytes: shared memory
    of a workgroup.
    """

    name: str
    source: str
    kinds: str
    block: bool
    tags: tuple[int, ...]
    local_size: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared_bytes: int


def translate(function: Any, push_bytes: int = 128) -> Shader:
    """The shader of a device function; TargetError names the kernel and what GLSL cannot do."""
    name = str(function.attrs["global_symbol"])
    try:
        return _translate(name, function, push_bytes)
    except UnsupportedError as error:
        raise UnsupportedError(error.what, where=f"kernel {name}", cure=error.cure) from error


def _translate(name: str, function: Any, push_bytes: int) -> Shader:
    used = usage(function)
    # the definition of a variable is one occurrence
    w = Writer(used={v for v, count in used.variables.items() if count > 1})
    w.device_barrier = bool(used.exchanged)
    fields = [_parameter(w, p, used) for p in function.params]
    statement(w, function.body)
    block = _offsets(fields)[-1] > push_bytes
    size, grid = _xyz(w.local_size), _xyz(w.grid)
    text = "\n".join(
        [*_head(w, size, block), *_arguments(fields, block), *w.shared, "", *_main(w, fields)]
    )
    kinds = "".join(f.kind for f in fields)
    return Shader(name, text + "\n", kinds, block, _tags(function), size, grid, w.shared_bytes)


def _xyz(sizes: dict[str, int]) -> tuple[int, int, int]:
    return sizes["x"], sizes["y"], sizes["z"]


@dataclass(frozen=True)
class _Field:
    """One argument: its declaration in the argument block and the local variable made of it."""

    type: str
    name: str
    kind: str
    size: int
    local: str


def _parameter(w: Writer, parameter: Any, used: Usage) -> _Field:
    name = w.names.of(parameter)
    if not isinstance(parameter.ty, tvm.ir.PointerType):
        kind = type_of(parameter)
        passed = "int" if kind.base == "bool" else kind.glsl
        size = 4 if kind.base == "bool" else kind.size
        return _Field(passed, name, ELEMENTS[kind.base].kind, size, kind.glsl)
    holder = DType(dtype(parameter.ty.element_type.dtype).base).stored
    access = used.access(parameter)
    reference = w.reference(holder, access)
    w.memory[parameter] = Memory("global", name, holder, access, holder)
    return _Field(reference, name, "P" if parameter in used.written else "p", 8, reference)


def _offsets(fields: list[_Field]) -> list[int]:
    """Where the arguments are, each aligned to itself, and where they end."""
    offsets, end = [], 0
    for f in fields:
        offsets.append(-(-end // f.size) * f.size)
        end = offsets[-1] + f.size
    return [*offsets, end]


def _head(w: Writer, size: tuple[int, int, int], block: bool) -> list[str]:
    x, y, z = size
    needed = sorted({*EXTENSIONS, *w.extensions, *(BLOCK_EXTENSIONS if block else ())})
    return [
        "#version 460",
        *(f"#extension {name} : require" for name in needed),
        f"layout(local_size_x = {x}, local_size_y = {y}, local_size_z = {z}) in;",
        *(w.references[key] for key in sorted(w.references)),
        *_helpers(w),
    ]


def _helpers(w: Writer) -> list[str]:
    texts: dict[str, None] = {}
    for name, kind in w.helpers:
        texts.update(dict.fromkeys(definition(name, kind)))
    return list(texts)


def _arguments(fields: list[_Field], block: bool) -> list[str]:
    if not fields:
        return []
    if not block:
        members = [f"  {f.type} {f.name};" for f in fields]
        return ["layout(push_constant, scalar) uniform Arguments {", *members, "} pc;"]
    return [
        "layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Arguments {",
        *_members_in_memory(fields),
        "};",
        "layout(push_constant, scalar) uniform Push { Arguments arguments; } push;",
        "#define pc push.arguments",
    ]


def _members_in_memory(fields: list[_Field]) -> list[str]:
    """Members at explicit places, addresses as two words.

    glslang gives the load of an address the alignment of what the address points to.
    """
    members = []
    for f, offset in zip(fields, _offsets(fields), strict=False):
        kind = "uvec2" if f.kind in "pP" else f.type
        members.append(f"  layout(offset = {offset}) {kind} {f.name};")
    return members


def _main(w: Writer, fields: list[_Field]) -> list[str]:
    bindings = [f"  {f.local} {f.name} = {f.local}(pc.{f.name});" for f in fields]
    matrices = [f"  {kind} {name};" for name, kind in w.matrices.items()]
    return ["void main() {", *bindings, *matrices, *w.lines, "}"]


def _tags(function: Any) -> tuple[int, ...]:
    tags = [str(tag) for tag in function.attrs["tirx.kernel_launch_params"]]
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown:
        raise UnsupportedError(f"the launch parameter {unknown[0]}")
    return tuple(TAGS.index(tag) for tag in tags)
