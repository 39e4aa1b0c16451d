"""What this machine can do: sequential read bandwidth, and single precision matrix products."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.errors import DeviceError
from k3tvm.runtime.memory import share, zeros
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import TargetProfile

READ_BYTES = 512 << 20  # many times any cache

# sgemm runs in a process of its own: thread counts are fixed when a BLAS is loaded, and some
# environments choose an older, slower kernel through these two variables.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
SGEMM = """
import time, numpy as np
a = np.random.default_rng(0).standard_normal((2048, 2048)).astype(np.float32)
b = a.T.copy()
best = 1e9
for _ in range(6):
    start = time.perf_counter(); a @ b; best = min(best, time.perf_counter() - start)
print(2 * 2048**3 / best)
"""


class ReadBandwidth:
    """Sums a large array, one contiguous stream per thread; `measure` gives bytes per second."""

    def __init__(self, profile: TargetProfile) -> None:
        self.data = zeros((READ_BYTES // 64, 16), "float32")
        self.data[:] = 1
        self.sums = zeros((256, 16), "float32")
        target = tvm.target.Target(profile.tvm_target())
        module = tvm.IRModule({"read": _read_kernel(READ_BYTES // 64)})
        self.kernel = tvm.compile(module, target=target)["read"]
        self.args = (share(self.data), share(self.sums))

    def measure(self, repeats: int = 5) -> float:
        """The best of some passes, in bytes per second."""
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            self.kernel(*self.args)
            best = min(best, time.perf_counter() - start)
        if self.sums.sum() != READ_BYTES / 4:
            raise DeviceError("the read test did not read everything")
        return READ_BYTES / best


def _read_kernel(rows: int) -> Any:
    """sums[task] = sum of the task's part of the data, eight running vectors."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("read")
        T.func_attr({"tirx.noalias": True, "global_symbol": "read"})
        data_handle, sums_handle = T.arg("data", T.handle()), T.arg("sums", T.handle())
        data = T.match_buffer(data_handle, (v.int64(rows), 16), "float32")
        sums = T.match_buffer(sums_handle, (v.int64(256), 16), "float32")
        part = rows // 256
        with v.parallel(256) as task:
            acc = [v.scratch(16) for _ in range(8)]
            for a in acc:
                v.store(a, v.splat(0.0), 0)
            with v.serial(part // 8) as i:
                for j, a in enumerate(acc):
                    v.store(a, v.load(a, 0) + v.load(data, task * part + i * 8 + j, 0), 0)
            total = v.load(acc[0], 0)
            for a in acc[1:]:
                total = total + v.load(a, 0)
            v.store(sums, total, task, 0)
    return builder.get()


def sgemm_peak(threads: int) -> float:
    """Best rate of NumPy's BLAS on 2048 x 2048 matrices, in operations (2 m n k) per second."""
    env = {k: value for k, value in os.environ.items() if k not in UNSET}
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        env[name] = str(threads)
    done = subprocess.run(
        [sys.executable, "-c", SGEMM], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DeviceError(f"the sgemm measurement failed: {done.stderr.strip()[-200:]}")
    return float(np.float64(done.stdout))
