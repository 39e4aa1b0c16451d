"""What was compiled becomes what the manifest says of it: traffic, minima, grids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3tvm.bundle.kernels import DeviceKernel, Minimum, Point
from k3tvm.report.calls import Calls, calls_of
from k3tvm.report.kept import kept_traffic
from k3tvm.report.minimum import minimum
from k3tvm.report.points import points_for
from k3tvm.report.traffic import LaunchTraffic, launch_count
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Kernel

SAMPLER = "sample"  # the function that follows each step


@dataclass(frozen=True)
class Description:
    """device_kernels: with what is known of them. minima: by the operator's key.

    unknown: operators of which TVM left out launches that can never be reached, so that it is not
    known which functions are whose.
    """

    points: tuple[Point, ...]
    device_kernels: tuple[DeviceKernel, ...]
    minima: dict[str, tuple[Minimum, ...]]
    unknown: tuple[str, ...] = ()


def describe(
    module: Any, kernels: Sequence[Kernel], built: Sequence[DeviceKernel], profile: GpuProfile
) -> Description:
    """Look at every kernel at each point at which the model calls it.

    module: the model, whose operators are called by name. built: the device functions.
    """
    points = points_for(profile.rows)
    calls = {p.name: _calls(module, p, profile) for p in points}
    minima: dict[str, tuple[Minimum, ...]] = {}
    found: dict[str, list[LaunchTraffic]] = {}
    owners: dict[str, str] = {}
    unknown: list[str] = []
    for kernel in kernels:
        op = kernel.operator
        functions = [k.name for k in built if _belongs(k.name, op.key)]
        owners |= dict.fromkeys(functions, op.key)
        where = [p for p in points if calls[p.name].count[op.key]]
        met = [calls[p.name].point_of(op, p) for p in where]
        counts = [calls[p.name].count[op.key] for p in where]
        minima[op.key] = tuple(minimum(op, p, n) for p, n in zip(met, counts, strict=True))
        if launch_count(kernel) != len(functions):
            unknown.append(op.key)  # functions are numbered: they cannot be told apart
            continue
        for launch in kept_traffic(kernel, met):
            found.setdefault(launch.function, []).append(launch)
    described = tuple(_described(k, owners.get(k.name, ""), found.get(k.name, [])) for k in built)
    return Description(points, described, minima, tuple(unknown))


def _calls(module: Any, point: Point, profile: GpuProfile) -> Calls:
    """Of one step at the point and the choice of its tokens; none of what the module lacks."""
    decode = "decode_captured" if profile.captured else "decode"
    entry = decode if point.rows == point.sequences else "prefill"
    names = {str(v.name_hint) for v in module.get_global_vars()}
    calls = Calls()
    for name in names & {entry, SAMPLER}:
        calls.add(calls_of(module, name))
    return calls


def _belongs(function: str, key: str) -> bool:
    """Whether a device function is one of an operator's."""
    return re.fullmatch(re.escape(key) + r"_kernel(_\d+)?", function) is not None


def _described(kernel: DeviceKernel, owner: str, launches: list[LaunchTraffic]) -> DeviceKernel:
    grid = launches[0].grid if launches else ()
    return replace(
        kernel, operator=owner, grid=grid, traffic=tuple(one.traffic for one in launches)
    )
