"""TIR statements, walked through at a point: launches, loops, conditions, loads and stores."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm
from k3tvm.report.expressions import evaluate, negated, split_index
from k3tvm.report.state import Cell, Launch, Shared, State, Tensor
from k3tvm.report.values import UNKNOWN, bounds, combine, is_always, is_known

TURNS = 64  # of a loop that changes integers: so many are followed one by one


def walk(s: State, node: Any) -> None:
    """Walk through a statement."""
    kind = type(node).__name__
    found = STATEMENTS.get(kind)
    if found is None:
        s.note(f"statements of kind {kind}")
        return
    found(s, node)


def _sequence(s: State, node: Any) -> None:
    for child in node.seq:
        walk(s, child)


def _bind(s: State, node: Any) -> None:
    s.variables[node.var] = evaluate(s, node.value)


def _attribute(s: State, node: Any) -> None:
    if str(node.attr_key) != "thread_extent":
        walk(s, node.body)
        return
    axis, tag = node.node, str(node.node.thread_tag)
    extent = evaluate(s, node.value)
    outermost = not s.extents
    if outermost:
        s.launches.append(Launch(len(s.launches) + s.skipped))
    launch = s.launches[-1]
    is_block = tag.startswith("blockIdx")
    if is_block:
        launch.grid_text.append(str(node.value).replace("T.", ""))
        s.blocks += 1
    (launch.grid if is_block else launch.threads).append(int(extent))
    with ExitStack() as stack:
        index: Any = 0
        for length in [int(extent)] if is_block else halves(int(extent)):
            part = stack.enter_context(s.axis(length))
            index = combine(operator.add, combine(operator.mul, index, length), part)
        s.variables[axis.var] = index if int(extent) > 1 else 0
        if tag == "threadIdx.x":
            s.thread, s.threads = index, int(extent)
        walk(s, node.body)
    if outermost:
        s.blocks = 0


def halves(count: int) -> list[int]:
    """Factors of a number of threads, an odd one and twos, each of which becomes an axis.

    What depends on some bits of a thread's number alone, such as its place in a warp, then depends
    on few axes.
    """
    twos = (count & -count).bit_length() - 1
    odd = count >> twos
    return [odd, *[2] * twos] if odd > 1 or not twos else [2] * twos


def _loop(s: State, node: Any) -> None:
    first, extent, unsure = _bounds_of(s, node)
    turns = int(np.max(extent))
    if turns <= 0:
        return
    changed = _changed_integers(s, node.body)
    if changed and turns <= TURNS:
        for turn in range(turns):
            s.variables[node.loop_var] = combine(operator.add, first, turn)
            with s.where([*unsure, *_shorter(extent, turn)]):
                walk(s, node.body)
        return
    for cell in changed:
        cell.lost = True
    with s.axis(turns) as index:
        i: Any = index if turns > 1 else 0
        s.variables[node.loop_var] = combine(operator.add, first, i)
        with s.where([*unsure, *_shorter(extent, i)]):
            walk(s, node.body)
    for cell in changed:
        cell.lost = False
        cell.values.clear()


def _bounds_of(s: State, node: Any) -> tuple[Any, Any, list[Any]]:
    """A loop's first index and length, and a condition that is not known if it may be shorter."""
    first, extent = evaluate(s, node.min), evaluate(s, node.extent)
    if is_known(extent):
        return first, extent, []
    ends = bounds(extent)
    if ends is None:
        s.note("a loop of unknown length, counted once")
        return first, 1, [UNKNOWN]
    return first, ends[1], [UNKNOWN]


def _shorter(extent: Any, i: Any) -> list[Any]:
    """The condition that a loop of this length has a turn i, unless all have."""
    if np.ndim(extent) == 0 or np.min(extent) == np.max(extent):
        return []
    return [combine(operator.gt, extent, i)]


def _changed_integers(s: State, body: Any) -> list[Cell]:
    """The integers from outside of a loop that it changes."""
    found: list[Cell] = []

    def note(node: Any) -> None:
        if type(node).__name__ == "BufferStore" and node.buffer in s.cells:
            cell = s.cells[node.buffer]
            if all(cell is not f for f in found):
                found.append(cell)

    tvm_ffi.structural_walk(body, ((tvm.tirx.Stmt, note),), order="pre")
    return found


def _while(s: State, node: Any) -> None:
    s.note("a loop of unknown length, counted once")
    evaluate(s, node.condition)
    walk(s, node.body)


def _branch(s: State, node: Any) -> None:
    conditions = [evaluate(s, c) for c in _all_of(node.condition)]
    conditions = [c for c in conditions if not is_always(c, True)]
    never = any(is_always(c, False) for c in conditions)
    if never:
        _skip(s, node.then_case)
    else:
        with s.where(conditions):
            walk(s, node.then_case)
    if node.else_case is None:
        return
    if not conditions:
        _skip(s, node.else_case)
        return
    whole = conditions[0]
    for c in conditions[1:]:
        whole = combine(operator.and_, whole, c)
    with s.where([] if never else [negated(whole)]):
        walk(s, node.else_case)


def _all_of(condition: Any) -> list[Any]:
    """Conditions that must all hold, one by one."""
    if type(condition).__name__ == "And":
        return [*_all_of(condition.a), *_all_of(condition.b)]
    return [condition]


def _skip(s: State, node: Any) -> None:
    """Launches that are not reached count, since the device functions are numbered."""
    if not s.extents and node is not None:
        s.skipped += count_launches(node)


def count_launches(node: Any) -> int:
    """Launches in a statement of the host's code."""
    count = 0

    def note(n: Any) -> None:
        nonlocal count
        if type(n).__name__ == "AttrStmt" and str(n.attr_key) == "thread_extent":
            count += str(n.node.thread_tag) == "blockIdx.x"

    tvm_ffi.structural_walk(node, ((tvm.tirx.Stmt, note),), order="pre")
    return count


def _allocate(s: State, node: Any) -> None:
    buffer = node.buffer
    scope, dtype = str(buffer.scope()), str(buffer.dtype)
    shape = [evaluate(s, d) for d in buffer.shape]
    if scope == "global":
        data = np.zeros(shape, np.int64) if dtype == "int32" else None
        s.tensors[buffer] = tensor_of("workspace", shape, dtype, data)
    elif dtype != "int32":
        return  # its contents are not followed
    elif scope == "shared":
        s.shared[buffer] = Shared(int(np.prod(shape)))
    elif scope in ("local", ""):
        s.cells[buffer] = Cell(len(s.conditions))


def tensor_of(name: str, shape: list[int], dtype: str, data: Any = None) -> Tensor:
    """Device memory of this shape."""
    kind = tvm.DataType(dtype)
    sizes = tuple(int(d) for d in shape)
    return Tensor(name, sizes, kind.bits * kind.lanes // 8, data, "float" in dtype)


def _declare(s: State, node: Any) -> None:
    """Views have no accesses of their own in our kernels, except of the arguments."""


def _evaluate(s: State, node: Any) -> None:
    evaluate(s, node.value)


def _store(s: State, node: Any) -> None:
    value = evaluate(s, node.value)
    index, lanes = split_index([evaluate(s, i) for i in node.indices])
    buffer = node.buffer
    if buffer in s.tensors:
        tensor = s.tensors[buffer]
        s.access(tensor, True, lanes, index)
        if tensor.data is not None:
            s.write_data(tensor, index, value if lanes == 1 else UNKNOWN)
    elif buffer in s.cells:
        s.write_cell(s.cells[buffer], index[0] if lanes == 1 else UNKNOWN, value)
    elif buffer in s.shared:
        s.write_shared(s.shared[buffer], index[0] if lanes == 1 else UNKNOWN, value)


STATEMENTS: dict[str, Callable[[State, Any], None]] = {
    "SeqStmt": _sequence,
    "Bind": _bind,
    "AttrStmt": _attribute,
    "For": _loop,
    "While": _while,
    "IfThenElse": _branch,
    "AllocBuffer": _allocate,
    "DeclBuffer": _declare,
    "Evaluate": _evaluate,
    "BufferStore": _store,
}
