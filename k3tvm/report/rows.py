"""The manifest's facts about kernels become rows of tables: operators at a point, functions."""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.bundle.kernels import DeviceKernel, Minimum, Resources, Traffic
from k3tvm.bundle.manifest import CodeEntry
from k3tvm.report.devices import Figures, estimate, figures_for


@dataclass(frozen=True)
class OperatorRow:
    """An operator at a point: all its launches together, of one call.

    seconds: the estimate. bound: what takes most of them. exact: else bytes are upper bounds.
    launches: 0 where it is not known which functions are its own; the rest is 0 then.
    """

    operator: str
    schedule: str
    calls: int
    launches: int
    workgroups: int
    minimum_bytes: int
    moved_bytes: int
    group_bytes: int
    requested_bytes: int
    flops: int
    matrix_flops: int
    integer_ops: int
    exact: bool
    bound: str
    seconds: float

    @property
    def ratio(self) -> float:
        """Moved bytes over the least possible."""
        return self.moved_bytes / self.minimum_bytes if self.minimum_bytes else 1.0

    @property
    def intensity(self) -> float:
        """Float operations for each byte that is moved."""
        return (self.flops + self.matrix_flops) / max(self.moved_bytes, 1)


@dataclass(frozen=True)
class FunctionRow:
    """A device function: what its launch asks for, and what it takes on one architecture."""

    function: str
    operator: str
    threads: tuple[int, int, int]
    grid: tuple[str, ...]
    shared_bytes: int
    resources: Resources | None
    occupancy: float | None
    limit: str


def device_of(code: CodeEntry) -> Figures:
    """The device whose figures the estimates of this code use."""
    archs = {r.arch for k in code.device_kernels for r in k.resources}
    return figures_for(code.kind.removesuffix("-emulated"), archs)


def operator_rows(code: CodeEntry, point: str) -> list[OperatorRow]:
    """The operators that a step at this point calls, those that take longest first."""
    device = device_of(code)
    rows = []
    for kernel in code.kernels:
        need = next((m for m in kernel.minimum if m.point == point), None)
        launches = [
            t
            for k in code.device_kernels
            if k.operator == kernel.key
            for t in k.traffic
            if t.point == point
        ]
        if need is not None:
            rows.append(_row(kernel.key, kernel.schedule, need, launches, device))
    return sorted(rows, key=lambda r: -r.seconds * r.calls)


def _row(
    key: str, schedule: str, need: Minimum, launches: list[Traffic], device: Figures
) -> OperatorRow:
    times: dict[str, float] = {} if launches else {"not counted": 0.0}
    for t in launches:
        one = estimate(t, device)
        times[one.bound] = times.get(one.bound, 0.0) + one.seconds
    return OperatorRow(
        operator=key,
        schedule=schedule,
        calls=need.calls,
        launches=len(launches),
        workgroups=sum(t.workgroups for t in launches),
        minimum_bytes=need.read_bytes + need.written_bytes,
        moved_bytes=sum(t.read_bytes + t.written_bytes for t in launches),
        group_bytes=sum(t.group_bytes for t in launches),
        requested_bytes=sum(t.requested_bytes for t in launches),
        flops=sum(t.flops for t in launches),
        matrix_flops=sum(t.matrix_flops for t in launches),
        integer_ops=sum(t.integer_ops for t in launches),
        exact=all(t.exact for t in launches),
        bound=max(times, key=lambda name: times[name]),
        seconds=sum(times.values()),
    )


def function_rows(code: CodeEntry) -> list[FunctionRow]:
    """Every device function, once for each architecture that there are resources of."""
    return [
        _function(k, r) for k in code.device_kernels for r in (*k.resources, *_none(k.resources))
    ]


def _none(resources: tuple[Resources, ...]) -> tuple[None, ...]:
    return () if resources else (None,)


def _function(k: DeviceKernel, resources: Resources | None) -> FunctionRow:
    share, limit = None, ""
    if resources is not None:
        from k3tvm.cuda.occupancy import occupancy

        threads = k.threads[0] * k.threads[1] * k.threads[2]
        found = occupancy(resources.arch, threads, resources.registers, resources.shared_bytes)
        if found is not None:
            share, limit = found.share, found.limit
    return FunctionRow(
        k.name, k.operator, k.threads, k.grid, k.shared_bytes, resources, share, limit
    )
