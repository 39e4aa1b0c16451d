"""A kernel and a point become what each of its launches moves and computes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from k3tvm.bundle.kernels import Point, Traffic
from k3tvm.relax_models.operators import Operator
from k3tvm.report.footprint import per_workgroup, points, requested, touched
from k3tvm.report.points import integers, scalars, symbols
from k3tvm.report.state import Launch, State
from k3tvm.report.statements import count_launches, tensor_of, walk
from k3tvm.schedules.registry import Kernel


@dataclass(frozen=True)
class LaunchTraffic:
    """One launch: the device function that it runs, its grid as text, and its traffic.

    notes: what the analysis could not follow.
    """

    function: str
    grid: tuple[str, ...]
    traffic: Traffic
    notes: tuple[str, ...]


def traffic_of(kernel: Kernel, point: Point) -> list[LaunchTraffic]:
    """The launches of a kernel at a point, in order, without those that the point does not need.

    Names of device functions are those that TVM gives them, in the order in which they stand.
    """
    state = _start(kernel, point)
    walk(state, kernel.func.body)
    return [_launch(kernel.operator, launch, point) for launch in state.launches]


def launch_count(kernel: Kernel) -> int:
    """How many launches a kernel has, of which each becomes a device function."""
    return count_launches(kernel.func.body)


def _start(kernel: Kernel, point: Point) -> State:
    """Sizes, scalars and arguments of the operator at the point."""
    op, func = kernel.operator, kernel.func
    sizes = symbols(point)
    variables: dict[Any, Any] = {}
    tensors: dict[Any, Any] = {}
    given = integers(op, point)
    numbers = scalars(op)
    for parameter in func.params:
        name = str(parameter.name)
        if name in numbers:
            variables[parameter] = numbers[name]
            continue
        for d in parameter.shape:
            if hasattr(d, "name"):
                variables[d] = sizes[str(d.name)]
        shape = [variables[d] if hasattr(d, "name") else int(d) for d in parameter.shape]
        tensors[parameter] = tensor_of(name, shape, str(parameter.dtype), given.get(name))
    return State(variables, tensors)


def _launch(op: Operator, launch: Launch, point: Point) -> LaunchTraffic:
    name = f"{op.key}_kernel" + (f"_{launch.number}" if launch.number else "")
    loads = [a for a in launch.accesses if not a.written]
    stores = [a for a in launch.accesses if a.written]
    everything = requested(launch.accesses)
    read, written = touched(loads), touched(stores)
    sampled = per_workgroup(loads, launch.grid) + per_workgroup(stores, launch.grid)
    groups = min(max(sampled, read.count + written.count), everything.count)
    done: Counter[str] = Counter()
    for domain, operations in launch.operations:
        times, _ = points(domain)
        for kind, amount in operations.items():
            done[kind] += amount * times
    exact = all(b.exact for b in (everything, read, written)) and not launch.notes
    traffic = Traffic(
        point.name,
        math.prod(launch.grid),
        read.count,
        written.count,
        groups,
        everything.count,
        int(done["flops"]),
        int(done["matrix"]),
        int(done["integers"]),
        exact,
    )
    return LaunchTraffic(
        name,
        tuple(launch.grid_text),
        traffic,
        tuple(sorted(launch.notes)),
    )
