"""Times of single kernels in a decode step and a prefill, by the host's clock or the device's."""

from __future__ import annotations

import json
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from k3tvm._ffi import tvm_ffi
from k3tvm.bundle.manifest import CodeEntry
from k3tvm.runtime.engine import Engine
from k3tvm.runtime.machine import Machine

if TYPE_CHECKING:
    from k3tvm.bench.cuda_clock import Clock

Run = dict[str, list[float]]  # seconds of every call, by kernel


def kernel_table(engine: Engine, prompt: int) -> list[dict[str, Any]]:
    """Time of every kernel in a decode step and in a prefill, longest first.

    Each row: entry, kernel, calls per run, microseconds per run of all calls together (medians
    over several runs), and the bytes that they move, if those are known for what is run here. On a
    GPU the times are the device's own timestamps, one per dispatch; on the CPU watching costs time
    between kernels, not inside them.
    """
    rows = []
    machine = engine.new_machine()
    stopwatch = _stopwatch(engine, machine)
    rng = np.random.default_rng(0)
    rows_at_once = min(prompt, engine.device.code.max_rows)
    for entry, tokens, runs in (("decode", 1, 16), ("prefill", rows_at_once, 3)):
        engine.reset()
        for _ in range(runs):
            ids = rng.integers(0, engine.config.vocab_size, tokens).astype(np.int32)
            stopwatch.begin()
            engine.run_on(machine, entry, ids)
            stopwatch.end()
        rows += _rows(entry, stopwatch.runs, moved_bytes(engine.device.code, tokens))
        stopwatch.runs = []
    engine.reset()
    return rows


def dispatches(table: list[dict[str, Any]]) -> int:
    """Launches of one decode step."""
    return sum(row["calls"] for row in table if row["entry"] == "decode")


class Stopwatch(Protocol):
    """Collects the times of kernels, run by run."""

    runs: list[Run]

    def begin(self) -> None:
        """A run begins."""

    def end(self) -> None:
        """It has ended."""


def _stopwatch(engine: Engine, machine: Machine) -> Stopwatch:
    device, kernels = engine.device, {k.key for k in engine.device.code.kernels}
    if device.code.kind == "vulkan":
        return _DeviceStopwatch("k3tvm.vulkan", device.index)
    if device.code.kind == "cuda":
        from k3tvm.bench.cuda_clock import Clock
        from k3tvm.cuda import runtime

        return CudaStopwatch(machine, kernels, Clock(runtime.load().library))
    return _HostStopwatch(machine, kernels)


class _HostStopwatch:
    """Called by the virtual machine before and after every call; only kernels count."""

    def __init__(self, machine: Machine, kernels: set[str]) -> None:
        self.runs: list[Run] = []
        self.kernels = kernels
        self.start = 0.0
        machine.instrument(self)

    def begin(self) -> None:
        """A new run."""
        self.runs.append({})

    def end(self) -> None:
        """Kernels have reported by themselves."""

    def __call__(self, function: Any, name: str, before: bool, result: Any, *args: Any) -> None:
        if name not in self.kernels:
            return
        if before:
            self.start = time.perf_counter()
        else:
            self.runs[-1].setdefault(name, []).append(time.perf_counter() - self.start)


class CudaStopwatch:
    """Events before and after every operator: nothing waits until the run has ended.

    Where the host is slower than the device, its time between two launches of one operator counts.
    """

    def __init__(self, machine: Machine, kernels: set[str], clock: Clock) -> None:
        self.runs: list[Run] = []
        self.kernels, self.clock = kernels, clock
        self.marks: list[tuple[str, Any, Any]] = []
        self.start: Any = None
        machine.instrument(self)

    def begin(self) -> None:
        """A new run."""
        self.marks = []

    def end(self) -> None:
        """Wait for the last event and collect."""
        times: Run = {}
        for name, start, stop in self.marks:
            times.setdefault(name, []).append(self.clock.between(start, stop))
        self.runs.append(times)

    def __call__(self, function: Any, name: str, before: bool, result: Any, *args: Any) -> None:
        if name not in self.kernels:
            return
        if before:
            self.start = self.clock.mark()
        else:
            self.marks.append((name, self.start, self.clock.mark()))


class _DeviceStopwatch:
    """Timestamps that the device itself takes around every dispatch."""

    def __init__(self, prefix: str, index: int) -> None:
        self.runs: list[Run] = []
        self.index = index
        find = tvm_ffi.get_global_func
        self._start, self._stop = find(f"{prefix}.profile_start"), find(f"{prefix}.profile_stop")

    def begin(self) -> None:
        """A new run."""
        self._start(self.index)

    def end(self) -> None:
        """Wait for the device and collect."""
        times: Run = {}
        for name, nanoseconds in json.loads(self._stop(self.index)):
            times.setdefault(name, []).append(nanoseconds / 1e9)
        self.runs.append(times)


def moved_bytes(code: CodeEntry, rows: int) -> dict[str, int]:
    """Bytes of one call by operator, and by device function, where the manifest has them.

    Attention is left out: how much of the cache it reads depends on how much there is.
    """
    points = {p.name for p in code.points if p.rows == rows and p.sequences == 1}
    names = {k.key for k in code.kernels if k.operator != "mla_attention"}
    found: dict[str, int] = {}
    for kernel in code.device_kernels:
        for t in kernel.traffic:
            if t.point in points and kernel.operator in names:
                for name in (kernel.operator, kernel.name):
                    found[name] = found.get(name, 0) + t.read_bytes + t.written_bytes
    return found


def _rows(entry: str, runs: list[Run], moved: dict[str, int]) -> list[dict[str, Any]]:
    """Medians over the runs."""
    rows: list[dict[str, Any]] = [
        {
            "entry": entry,
            "kernel": name,
            "calls": len(calls),
            "microseconds": median(sum(run[name]) for run in runs) * 1e6,
            "bytes": moved[name] * len(calls) if name in moved else None,
        }
        for name, calls in runs[0].items()
    ]
    return sorted(rows, key=lambda row: -float(row["microseconds"]))
