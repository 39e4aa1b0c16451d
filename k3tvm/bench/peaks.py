"""What this machine can do: sequential read bandwidth, and single precision matrix products.

Both are measured in processes of their own: their memory is not the engine's, thread counts are
fixed when a BLAS is loaded, and the engine needs no compiler while this does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from k3tvm.errors import DeviceError
from k3tvm.runtime.device_memory import VULKAN, DeviceMemory
from k3tvm.schedules.profile import GpuProfile

READ_BYTES = 512 << 20  # many times any cache
AHEAD = (0, 192)  # cache lines asked for early; both are tried, since machines differ
PART = 1 << 18  # bytes that a workgroup of a GPU reads
TASKS = 256  # parts of the data; every thread gets consecutive ones
REPEATS = 6

# Some environments choose an older, slower BLAS kernel through these two variables.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
SGEMM = f"""
import time, numpy as np
a = np.random.default_rng(0).standard_normal((2048, 2048)).astype(np.float32)
b = a.T.copy()
best = 1e9
for _ in range({REPEATS}):
    start = time.perf_counter(); a @ b; best = min(best, time.perf_counter() - start)
print(2 * 2048**3 / best)
"""


def sgemm_peak(threads: int) -> float:
    """Best rate of NumPy's BLAS on 2048 x 2048 matrices, in operations (2 m n k) per second."""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    return _measure(["-c", SGEMM], dict.fromkeys(names, str(threads)))


def read_peak(target: str, threads: int) -> float:
    """Best rate of summing a large array, one contiguous stream per thread, in bytes per second."""
    return _measure(["-m", "k3tvm.bench.peaks", target], {"TVM_NUM_THREADS": str(threads)})


def _measure(arguments: list[str], variables: dict[str, str]) -> float:
    env = {k: v for k, v in os.environ.items() if k not in UNSET} | variables
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        said = re.sub(r"^k3tvm[\w.]*: ", "", lines[-1])  # without the name of the exception
        raise DeviceError(f"a measurement of this machine failed: {said}")
    return float(done.stdout)


def _read_rate(target: str) -> float:
    """Compile the read kernel, run it, check that it read everything."""
    from k3tvm._tvm import tvm
    from k3tvm.compiler.targets import profile_of
    from k3tvm.runtime.memory import share, zeros

    rows = READ_BYTES // 64
    data, sums = zeros((rows, 16), "float32"), zeros((TASKS, 16), "float32")
    data[:] = 1
    native = tvm.target.Target(profile_of(target).tvm_target())
    best = float("inf")
    for ahead in AHEAD:
        module = tvm.IRModule({"read": _read_kernel(rows, ahead)})
        kernel = tvm.compile(module, target=native)["read"]
        sums[:] = 0
        for _ in range(REPEATS):
            start = time.perf_counter()
            kernel(share(data), share(sums))
            best = min(best, time.perf_counter() - start)
        if sums.sum() != READ_BYTES / 4:
            raise DeviceError("the read test did not read everything")
    return READ_BYTES / best


def _device_read_rate(kind: str, index: int) -> float:
    """The same on a GPU, by the device's own clock."""
    profile, memory, timer = DEVICES[kind](index)
    kernel = _device_function(profile)
    data = memory.block((READ_BYTES // 4,), "float32")
    sums = memory.block((READ_BYTES // PART,), "float32")
    data.write(0, np.ones(READ_BYTES // 4, np.float32))
    best = min(timer(lambda: kernel(data.tensor, sums.tensor)))
    if sums.read(0, READ_BYTES // PART).sum() != READ_BYTES / 4:
        raise DeviceError("the read test did not read everything")
    return READ_BYTES / best


Timer = Callable[[Callable[[], object]], list[float]]  # seconds of each of REPEATS runs


def _vulkan(index: int) -> tuple[GpuProfile, DeviceMemory, Timer]:
    from k3tvm._ffi import tvm_ffi
    from k3tvm.compiler.targets.vulkan import vulkan_profile
    from k3tvm.vulkan import plugin

    plugin.load()

    def timer(work: Callable[[], object]) -> list[float]:
        tvm_ffi.get_global_func("k3tvm.vulkan.profile_start")(index)
        for _ in range(REPEATS):
            work()
        times = tvm_ffi.get_global_func("k3tvm.vulkan.profile_stop")(index)
        return [nanoseconds / 1e9 for _, nanoseconds in json.loads(times)]

    memory = DeviceMemory(VULKAN, index, "k3tvm.vulkan")
    return vulkan_profile(f"from-device:{index}"), memory, timer


def _cuda(index: int) -> tuple[GpuProfile, DeviceMemory, Timer]:
    from k3tvm.bench.cuda_clock import Clock
    from k3tvm.compiler.targets.cuda import cuda_profile
    from k3tvm.cuda import runtime

    found, clock = runtime.find(str(index)), Clock(runtime.load().library)
    profile = cuda_profile(found.arch)
    memory = DeviceMemory(runtime.CUDA, index, "k3tvm.cuda")
    return profile, memory, lambda work: [clock.seconds(work) for _ in range(REPEATS)]


DEVICES = {"vulkan": _vulkan, "cuda": _cuda}


def _device_function(profile: GpuProfile) -> Any:
    """The read kernel, by way of a library as in a bundle: CUDA code cannot run before."""
    from k3tvm._tvm import tvm
    from k3tvm.compiler import lowering

    target = tvm.target.Target(profile.tvm_target())
    module = tvm.IRModule({"read": _device_read_kernel()})
    with lowering.device_code(profile):
        built = tvm.compile(module, target=target, tir_pipeline=lowering.register(profile.kind))
    with tempfile.TemporaryDirectory(prefix="k3tvm-") as folder:
        path = Path(folder, "read.so")
        built.export_library(str(path))
        return tvm.runtime.load_module(str(path))["read"]


def _device_read_kernel() -> Any:
    """sums[group] = sum of PART bytes of the data, 16 bytes a load."""
    from k3tvm._tvm import IRBuilder, T
    from k3tvm.schedules.gpu import grid as g

    threads = 256
    with IRBuilder() as builder, T.prim_func():
        T.func_name("read")
        T.func_attr({"tirx.noalias": True, "global_symbol": "read"})
        handles = T.arg("data", T.handle()), T.arg("sums", T.handle())
        data = T.match_buffer(handles[0], (READ_BYTES // 4,), "float32")
        sums = T.match_buffer(handles[1], (READ_BYTES // PART,), "float32")
        with g.groups(READ_BYTES // PART, threads) as (group, thread):
            parts, total = g.shared(threads), g.variable(g.splat(0.0, 4))
            with g.serial(PART // 16 // threads) as i:
                at = (group * (PART // 16) + i * threads + thread) * 4
                more = g.load(total, 0, lanes=4) + g.load(data, at, lanes=4)
                g.store(total, more, 0, lanes=4)
            g.store(parts, total[0] + total[1] + total[2] + total[3], thread)
            whole = g.sum_of(parts, thread, threads)
            with g.when(thread == T.int32(0)):
                g.store(sums, whole, group)
    return builder.get()


def _read_kernel(rows: int, ahead: int) -> Any:
    """sums[task] = sum of the task's part of the data, eight running vectors."""
    from k3tvm._tvm import IRBuilder, T
    from k3tvm.schedules import vector as v

    with IRBuilder() as builder, T.prim_func():
        T.func_name("read")
        T.func_attr({"tirx.noalias": True, "global_symbol": "read"})
        data_handle, sums_handle = T.arg("data", T.handle()), T.arg("sums", T.handle())
        data = T.match_buffer(data_handle, (v.int64(rows), 16), "float32")
        sums = T.match_buffer(sums_handle, (v.int64(TASKS), 16), "float32")
        part = rows // TASKS
        with v.parallel(TASKS) as task:
            acc = [v.scratch(16) for _ in range(8)]
            for a in acc:
                v.store(a, v.splat(0.0), 0)
            with v.serial(part // 8) as i:
                for j, a in enumerate(acc):
                    if ahead:
                        v.prefetch(data, task * part + i * 8 + (j + ahead), 0)
                    v.store(a, v.load(a, 0) + v.load(data, task * part + i * 8 + j, 0), 0)
            total = v.load(acc[0], 0)
            for a in acc[1:]:
                total = total + v.load(a, 0)
            v.store(sums, total, task, 0)
    return builder.get()


if __name__ == "__main__":
    kind, _, variant = sys.argv[1].partition(":")
    on_gpu = kind in DEVICES
    print(_device_read_rate(kind, int(variant)) if on_gpu else _read_rate(sys.argv[1]))
