"""F: a benchmark of a device that CI lacks, wrong from its first day. Stand-ins for the device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from k3tvm.bench.bench import Plan, bench
from k3tvm.bench.cuda_clock import COPIED, Clock, copy_rate
from k3tvm.bench.kernels import CudaStopwatch, moved_bytes
from k3tvm.bundle.kernels import DeviceKernel, KernelEntry, Point, Traffic
from k3tvm.bundle.manifest import CodeEntry, FileEntry
from k3tvm.errors import DeviceError
from tests.devices import require


class Cudart:
    """Events are numbers; each piece of work moves the time on."""

    def __init__(self, fails: str = "") -> None:
        self.now, self.made, self.gone, self.fails = 0.0, 0, 0, fails
        self.times: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 700
            return getattr(self, f"do_{name}")(*arguments)

        if name.startswith("do_"):
            raise AttributeError(name)
        return call

    def do_cudaEventCreate(self, event: Any) -> int:
        self.made += 1
        event._obj.value = self.made
        return 0

    def do_cudaEventRecord(self, event: ctypes.c_void_p, stream: None) -> int:
        self.times[event.value or 0] = self.now
        return 0

    def do_cudaEventSynchronize(self, event: ctypes.c_void_p) -> int:
        return 0

    def do_cudaEventElapsedTime(self, result: Any, start: Any, stop: Any) -> int:
        result._obj.value = self.times[stop.value] - self.times[start.value]
        return 0

    def do_cudaEventDestroy(self, event: ctypes.c_void_p) -> int:
        self.gone += 1
        return 0

    def work(self, milliseconds: float) -> None:
        self.now += milliseconds


def test_clock_gives_seconds_of_one_call():
    cudart = Cudart()
    clock = Clock(cudart)
    assert clock.seconds(lambda: cudart.work(8), 4) == pytest.approx(8e-3)
    assert cudart.made == cudart.gone == 2


def test_errors_of_the_driver_are_ours():
    with pytest.raises(DeviceError, match="cudaEventElapsedTime fails with error 700"):
        Clock(Cudart("cudaEventElapsedTime")).seconds(lambda: None)


def test_copies_count_both_ways():
    """The best run: 2 GiB in 4 ms."""
    cudart, runs = Cudart(), iter([9.0, 4.0, *[5.0] * 20])

    class Memory:
        def empty(self, shape: tuple[int, ...], dtype: str) -> str:
            assert (shape, dtype) == ((COPIED,), "uint8")
            return "tensor"

        def copy(self, *arguments: Any) -> None:
            assert arguments == ("tensor", 0, "tensor", 0, COPIED)
            cudart.work(next(runs))

    assert copy_rate(Clock(cudart), Memory()) == pytest.approx(2 * COPIED / 4e-3)


def test_stopwatch_times_operators_and_nothing_else():
    cudart = Cudart()

    class Machine:
        def instrument(self, stopwatch: Any) -> None:
            self.stopwatch = stopwatch

    machine: Any = Machine()
    watch = CudaStopwatch(machine, {"a", "b"}, Clock(cudart))
    watch.begin()
    for name, milliseconds in [("a", 1.0), ("vm.builtin", 50.0), ("b", 2.0), ("a", 3.0)]:
        machine.stopwatch(None, name, True, None)
        cudart.work(milliseconds)
        machine.stopwatch(None, name, False, None)
    watch.end()
    assert watch.runs == [{"a": pytest.approx([1e-3, 3e-3]), "b": pytest.approx([2e-3])}]
    assert cudart.made == cudart.gone


def code(kind: str = "cuda") -> CodeEntry:
    def traffic(point: str, read: int) -> Traffic:
        return Traffic(point, 1, read, 1, 0, 0, 0, 0, 0, True)

    def kernel(name: str, owner: str, *found: Traffic) -> DeviceKernel:
        return DeviceKernel(name, (32, 1, 1), 0, 0, (), operator=owner, traffic=found)

    return CodeEntry(
        "cuda",
        kind,
        "",
        "portable",
        FileEntry("code/cuda.so", 1, ""),
        (KernelEntry("lin", "linear", "s", "r"), KernelEntry("att", "mla_attention", "s", "r")),
        1024,
        16,
        (
            kernel("lin_kernel", "lin", traffic("decode", 10), traffic("prefill 64", 90)),
            kernel("lin_kernel_1", "lin", traffic("decode", 5)),
            kernel("att_kernel", "att", traffic("decode", 7)),
        ),
        points=(
            Point("decode", 1, 1, 9),
            Point("decode 16", 16, 16, 9),
            Point("prefill 64", 64, 1, 0),
        ),
    )


def test_bytes_are_those_of_the_same_sizes():
    """All launches of an operator; none for other sizes, none for attention."""
    assert moved_bytes(code(), 1) == {"lin": 17, "lin_kernel": 11, "lin_kernel_1": 6}
    assert moved_bytes(code(), 64) == {"lin": 91, "lin_kernel": 91}
    assert moved_bytes(code(), 63) == {}


def test_emulated_devices_are_not_measured():
    class Engine:
        class device:
            code = code("cuda-emulated")
            label = "CUDA emulated on the CPU"

    engine: Any = Engine()
    with pytest.raises(DeviceError, match="emulated"):
        bench(engine, Plan(), lambda message: None)


def test_read_kernel_reads_everything(monkeypatch):
    """By way of a library, on the emulated device: each workgroup's sum."""
    from k3tvm import emulate
    from k3tvm.bench import peaks
    from k3tvm.compiler.targets.cuda import cuda_emulated_profile
    from k3tvm.runtime.device_memory import DeviceMemory

    require("cuda-emulated")
    emulate.install("cuda")
    monkeypatch.setattr(peaks, "READ_BYTES", 4 * peaks.PART)
    kernel = peaks._device_function(cuda_emulated_profile())
    memory = DeviceMemory(emulate.TYPES["cuda"], 0, "k3tvm.emulate")
    values = np.arange(peaks.READ_BYTES // 4, dtype=np.float32) % 7
    data, sums = memory.put(values), memory.empty((4,), "float32")
    kernel(data, sums)
    np.testing.assert_array_equal(memory.get(sums), values.reshape(4, -1).sum(axis=1))
