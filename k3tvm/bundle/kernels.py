"""What a manifest says of kernels: which serve the operators, what they ask of a device, and why.

The least that an operator must move, and what its kernels do move, are given at a few points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """Sizes at which kernels are looked at: rows of all sequences, tokens cached before of each."""

    name: str
    rows: int
    sequences: int
    cached: int


@dataclass(frozen=True)
class Minimum:
    """What an operator must read and write at a point, whatever its kernels do.

    calls: of the operator in one step of the model.
    """

    point: str
    calls: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class KernelEntry:
    """Which schedule serves an operator, and why; on a GPU also the least that it must move."""

    key: str
    operator: str
    schedule: str
    reason: str
    minimum: tuple[Minimum, ...] = ()


@dataclass(frozen=True)
class Resources:
    """What a compiler gave a kernel on one architecture, per thread and (shared) per workgroup.

    Spills are registers that are kept in memory, counted where the code stores and loads them.
    """

    arch: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int

    @property
    def spill_bytes(self) -> int:
        """Stored and loaded."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True)
class Traffic:
    """What one launch of a kernel moves in device memory and computes at a point.

    read_bytes, written_bytes: each byte once. group_bytes: each byte once per workgroup that
    touches it. requested_bytes: of all loads and stores. flops: additions, products and functions
    of floats; matrix_flops: of matrix instructions; integer_ops: on data, not for indices. exact:
    else some of them are upper bounds.
    """

    point: str
    workgroups: int
    read_bytes: int
    written_bytes: int
    group_bytes: int
    requested_bytes: int
    flops: int
    matrix_flops: int
    integer_ops: int
    exact: bool


@dataclass(frozen=True)
class DeviceKernel:
    """One function that a GPU runs, and what its launches ask of the device.

    threads: of a workgroup, by dimension. push_bytes: of arguments that are pushed. features: as in
    `schedules.profile`. operator: the key of the operator that it belongs to. grid: workgroups by
    dimension, as the host computes them. resources: by architecture, where a compiler says it.
    traffic: at those points at which the kernel is launched.
    """

    name: str
    threads: tuple[int, int, int]
    shared_bytes: int
    push_bytes: int = 0
    features: tuple[str, ...] = ()
    operator: str = ""
    grid: tuple[str, ...] = ()
    resources: tuple[Resources, ...] = ()
    traffic: tuple[Traffic, ...] = ()


def device_kernel(k: dict[str, Any]) -> DeviceKernel:
    """From JSON."""
    x, y, z = k["threads"]
    own = {
        "threads": (x, y, z),
        "features": tuple(k["features"]),
        "grid": tuple(k["grid"]),
        "resources": tuple(Resources(**r) for r in k["resources"]),
        "traffic": tuple(Traffic(**t) for t in k["traffic"]),
    }
    return DeviceKernel(**(k | own))


def kernel_entry(k: dict[str, Any]) -> KernelEntry:
    """From JSON."""
    return KernelEntry(**(k | {"minimum": tuple(Minimum(**m) for m in k["minimum"])}))
