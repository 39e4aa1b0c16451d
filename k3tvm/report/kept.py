"""The traffic of a kernel at a point, looked up before it is counted: large models take a while."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache as once
from pathlib import Path

from k3tvm.bundle.kernels import Point, Traffic
from k3tvm.compiler import cache
from k3tvm.report.traffic import LaunchTraffic, traffic_of
from k3tvm.schedules.registry import Kernel

KIND = "traffic"


def kept_traffic(kernel: Kernel, points: list[Point]) -> list[LaunchTraffic]:
    """The launches at all the points, from the cache where the same kernel was looked at before."""
    text = kernel.func.script(show_meta=False)
    found = []
    for point in points:
        key = cache.key_of([_counting(), repr(kernel.operator), repr(point), text])
        data = cache.read(KIND, key)
        launches = traffic_of(kernel, point) if data is None else _parse(data)
        if data is None:
            cache.write(KIND, key, json.dumps([asdict(one) for one in launches]).encode())
        found += launches
    return found


@once
def _counting() -> str:
    """The key of the programs that count: with others there may be other numbers."""
    folder = Path(__file__).parent
    return cache.key_of(p.read_text() for p in sorted(folder.glob("*.py")))


def _parse(data: bytes) -> list[LaunchTraffic]:
    return [
        LaunchTraffic(
            one["function"],
            tuple(one["grid"]),
            Traffic(**one["traffic"]),
            tuple(one["notes"]),
        )
        for one in json.loads(data)
    ]
