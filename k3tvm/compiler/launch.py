"""A lowered device function becomes the facts of its launch: threads, memory, arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm
from k3tvm.errors import TargetError
from k3tvm.schedules.profile import GpuProfile

AXES = "xyz"


@dataclass(frozen=True)
class Launch:
    """What a kernel asks of a device.

    parameters: their types in order, such as "int32" or "handle" for a pointer. tags: the launch
    parameters that follow them in a call, such as "blockIdx.x". threads: of a workgroup. grid:
    workgroups by dimension, 0 where only the launch knows. shared_bytes: of a workgroup's memory.
    """

    name: str
    parameters: tuple[str, ...]
    tags: tuple[str, ...]
    threads: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared_bytes: int

    @property
    def total_threads(self) -> int:
        """Threads of a workgroup."""
        return math.prod(self.threads)


def launch_of(function: Any) -> Launch:
    """The launch of a device function, as TVM hands it to a code generator."""
    extents: dict[str, int] = {}
    shared = 0

    def note(node: Any) -> None:
        nonlocal shared
        kind = type(node).__name__
        if kind == "AttrStmt" and str(node.attr_key) == "thread_extent":
            extents[str(node.node.thread_tag)] = int(getattr(node.value, "value", 0))
        elif kind == "AllocBuffer" and str(node.buffer.scope()) == "shared":
            shared += _bytes(node.buffer)

    tvm_ffi.structural_walk(function.body, ((tvm.tirx.Stmt, note),), order="pre")
    return Launch(
        str(function.attrs["global_symbol"]),
        tuple(_type(p) for p in function.params),
        tuple(str(tag) for tag in function.attrs["tirx.kernel_launch_params"]),
        _sizes(extents, "threadIdx"),
        _sizes(extents, "blockIdx"),
        shared,
    )


def check_launch(launch: Launch, profile: GpuProfile) -> None:
    """TargetError naming the kernel, what it needs and what `profile` has, if that is too little.

    Workgroups are counted where the kernel says how many.
    """
    for need in _excesses(launch, profile):
        raise TargetError(
            f"needs {need}",
            where=f"kernel {launch.name}",
            cure=f"compile for a target with more than {profile.name} has",
        )


def _excesses(launch: Launch, p: GpuProfile) -> Iterator[str]:
    if launch.total_threads > p.threads:
        yield f"{launch.total_threads} threads in a workgroup, {p.name} has {p.threads}"
    for axis, size, limit in zip(AXES, launch.threads, p.threads_xyz, strict=True):
        if size > limit:
            yield f"{size} threads in {axis}, {p.name} has {limit}"
    if launch.shared_bytes > p.shared_bytes:
        yield f"{launch.shared_bytes} bytes of shared memory, {p.name} has {p.shared_bytes}"
    for axis, size, limit in zip(AXES, launch.grid, p.grid, strict=True):
        if size > limit:
            yield f"{size} workgroups in {axis}, {p.name} has {limit}"


def _sizes(extents: dict[str, int], kind: str) -> tuple[int, int, int]:
    x, y, z = (extents.get(f"{kind}.{axis}", 1) for axis in AXES)
    return x, y, z


def _type(parameter: Any) -> str:
    pointer = isinstance(parameter.ty, tvm.ir.PointerType)
    return "handle" if pointer else str(parameter.ty)


def _bytes(buffer: Any) -> int:
    element = tvm.DataType(str(buffer.dtype))
    return math.prod(int(d) for d in buffer.shape) * element.bits * element.lanes // 8
