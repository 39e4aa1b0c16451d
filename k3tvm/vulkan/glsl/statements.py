"""Turns TIR statements into GLSL statements: one table row per kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl import memory
from k3tvm.vulkan.glsl.access import acts, loads, viewed
from k3tvm.vulkan.glsl.lanes import WIDTH
from k3tvm.vulkan.glsl.types import UnsupportedError, dtype, type_of
from k3tvm.vulkan.glsl.writer import Memory, Writer, bare, expression

UNROLLED = 3
HINTS = ("pragma_", "reduce_scope")
LOCAL_SCOPES = ("local", "global", "")


def statement(w: Writer, node: Any) -> None:
    """Write a TIR statement."""
    kind = type(node).__name__
    if kind not in STATEMENTS:
        raise UnsupportedError(f"no GLSL for statements of kind {kind}")
    with w.unguarded():
        STATEMENTS[kind](w, node)


def sequence(w: Writer, node: Any) -> None:
    """One after the other."""
    for child in node.seq:
        statement(w, child)


def bind(w: Writer, node: Any) -> None:
    """A variable that never changes; not written down if nothing reads it."""
    if node.var not in w.used and not acts(node.value):
        return
    kind = type_of(node.value)
    if kind.lanes > WIDTH:
        _bind_parts(w, node)
        return
    text = bare(expression(w, node.value))
    if kind.lanes == 1 and not kind.is_float and not loads(node.value):
        w.know(node.var, node.value)
    w.line(f"{kind.glsl} {w.names.of(node.var)} = {text};")


def _bind_parts(w: Writer, node: Any) -> None:
    """A wide vector is several variables."""
    variables = []
    for value in w.splitter.parts(node.value):
        kind = type_of(value)
        variables.append(tvm.tirx.Var(str(node.var.name), str(kind)))
        w.line(f"{kind.glsl} {w.names.of(variables[-1])} = {bare(expression(w, value))};")
    w.splitter.variables[node.var] = variables


def declare(w: Writer, node: Any) -> None:
    """A view of a kernel parameter or of memory that was allocated before."""
    data = viewed(node)
    if data not in w.memory:
        raise UnsupportedError(f"a buffer over {type(data).__name__} {data}")
    base, kind = w.memory[data], dtype(node.buffer.ty.dtype.dtype)
    if base.space != "global" and base.dtype != kind:
        raise UnsupportedError(
            f"a view as {kind} of {base.space} memory {base.name} of {base.dtype}"
        )
    w.memory[node.buffer] = Memory(base.space, base.name, kind, base.access, base.holder)


def allocate(w: Writer, node: Any) -> None:
    """Memory of the workgroup or of one thread."""
    kind_of_buffer = node.buffer.ty
    kind, scope = dtype(kind_of_buffer.dtype.dtype), str(kind_of_buffer.storage_scope)
    count = math.prod(_extent(d) for d in kind_of_buffer.shape)
    name = w.names.of(node.buffer)
    if scope == "shared":
        w.shared.append(f"shared {kind.glsl} {name}[{count}];")
        w.shared_bytes += count * kind.size
        w.memory[node.buffer] = Memory("shared", name, kind)
    elif scope in LOCAL_SCOPES and count == 1:
        w.line(f"{kind.glsl} {name};")
        w.memory[node.buffer] = Memory("variable", name, kind)
    elif scope in LOCAL_SCOPES:
        w.line(f"{kind.glsl} {name}[{count}];")
        w.memory[node.buffer] = Memory("local", name, kind)
    else:
        raise UnsupportedError(f"memory of scope {scope!r}")


def _extent(node: Any) -> int:
    value = getattr(node, "value", None)
    if value is None:
        raise UnsupportedError(f"an allocation of variable size {node}")
    return int(value)


def attribute(w: Writer, node: Any) -> None:
    """The index of a thread or workgroup, or a hint that GLSL does not need."""
    key = str(node.attr_key)
    if key == "thread_extent":
        _launch_index(w, node.node, node.value)
    elif not key.startswith(HINTS):
        raise UnsupportedError(f"the attribute {key}")
    statement(w, node.body)


def _launch_index(w: Writer, axis: Any, extent: Any) -> None:
    tag, variable = str(axis.thread_tag), axis.var
    if w.names.known(variable):
        return
    if tag.startswith("threadIdx."):
        w.local_size[tag[-1]] = _extent(extent)
        source = f"gl_LocalInvocationID.{tag[-1]}"
    elif tag.startswith("blockIdx."):
        w.grid[tag[-1]] = int(getattr(extent, "value", 0))
        source = f"gl_WorkGroupID.{tag[-1]}"
    else:
        raise UnsupportedError(f"the launch axis {tag}")
    w.know(variable, tvm.ir.Range.from_min_extent(0, extent))
    kind = type_of(variable).glsl
    w.line(f"{kind} {w.names.of(variable)} = {kind}({source});")


def loop(w: Writer, node: Any) -> None:
    """A counted loop; its bounds are evaluated once."""
    variable, kind = w.names.of(node.loop_var), type_of(node.loop_var)
    begin = expression(w, node.min)
    end = expression(w, node.min + node.extent)
    if loads(node.min) or loads(node.extent):
        end = w.hoist(kind, end, f"{variable}_end")
    step = node.step
    advance = f"++{variable}" if step is None else f"{variable} += {expression(w, step)}"
    if step is None:
        w.know(node.loop_var, tvm.ir.Range.from_min_extent(node.min, node.extent))
    # Kernels unroll themselves what must be; drivers would unroll the rest as well, and Mesa then
    # takes 3 to 16 s for a matrix product that it compiles in less than one this way.
    w.line("[[unroll]]" if int(node.kind) == UNROLLED else "[[dont_unroll]]")
    with w.block(
        f"for ({kind.glsl} {variable} = {bare(begin)}; {variable} < {bare(end)}; {advance})"
    ):
        statement(w, node.body)


def while_loop(w: Writer, node: Any) -> None:
    """A loop whose condition, with all that it needs, is evaluated in every round."""
    with w.block("while (true)"):
        w.line(f"if (!{expression(w, node.condition)}) break;")
        statement(w, node.body)


def branch(w: Writer, node: Any) -> None:
    """if, else."""
    with w.block(f"if ({bare(expression(w, node.condition))})"):
        statement(w, node.then_case)
    if node.else_case is not None:
        with w.block("else"):
            statement(w, node.else_case)


def evaluate(w: Writer, node: Any) -> None:
    """A call for its effect; bare values have none."""
    if type(node.value).__name__ == "Call":
        w.line(f"{expression(w, node.value)};")


STATEMENTS: dict[str, Callable[[Writer, Any], None]] = {
    "SeqStmt": sequence,
    "Bind": bind,
    "DeclBuffer": declare,
    "AllocBuffer": allocate,
    "AttrStmt": attribute,
    "For": loop,
    "While": while_loop,
    "IfThenElse": branch,
    "Evaluate": evaluate,
    "BufferStore": memory.store,
    "Break": lambda w, node: w.line("break;"),
    "Continue": lambda w, node: w.line("continue;"),
    "Return": lambda w, node: w.line("return;"),
}
