"""Our KDA kernels, compiled for a CUDA device or its emulation, over inputs in its memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from kda_inputs import Array, Case, Inputs

from k3tvm._tvm import tvm
from k3tvm.compiler import lowering
from k3tvm.compiler.targets.cuda import cuda_emulated_profile, cuda_profile
from k3tvm.relax_models.operators import Activation, KdaChunk, KdaStep
from k3tvm.runtime.device_memory import DeviceMemory
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import select


def open_cuda(index: int) -> tuple[DeviceMemory, GpuProfile, str]:
    """A GPU of this machine, its profile and its name; DeviceError where there is none."""
    from k3tvm.cuda import runtime

    found = runtime.find(str(index))
    memory = DeviceMemory(runtime.CUDA, index, "k3tvm.cuda")
    return memory, cuda_profile(found.arch), found.name


def open_emulated() -> tuple[DeviceMemory, GpuProfile, str]:
    """The emulated device."""
    from k3tvm import emulate

    emulate.install("cuda")
    memory = DeviceMemory(emulate.TYPES["cuda"], 0, "k3tvm.emulate")
    return memory, cuda_emulated_profile(), emulate.NAMES["cuda"]


class Ours:
    """The kernel that fits a case, with its arguments."""

    def __init__(
        self, case: Case, x: Inputs, memory: DeviceMemory, profile: GpuProfile, act: Activation
    ) -> None:
        self.case, self.memory = case, memory
        kind = KdaStep if case.tokens == 1 else KdaChunk
        op = kind(case.heads, case.dim, case.dim, act)
        self.kernel = _load(op, profile)
        self.first_state = x.state
        rows = case.sequences * case.tokens
        flat = [a.reshape(rows, -1) for a in (x.q, x.k, x.v)]
        s = np.arange(case.sequences, dtype=np.int32)
        seqs = [s, s * case.tokens, np.full_like(s, case.tokens), np.zeros_like(s)]
        self.state = memory.put(x.state)
        self.out = memory.empty((rows, case.heads * case.dim), "float32")
        self.given = [
            memory.put(np.concatenate(flat, axis=1)),
            memory.put(np.exp(x.log_decay).reshape(rows, -1)),
            memory.put(x.beta.reshape(rows, -1)),
            memory.put(np.stack(seqs, axis=1)),
        ]

    def run(self) -> None:
        """One launch of the whole operator; the state goes on from where it is."""
        self.kernel(*self.given, self.state, self.out)

    def results(self) -> tuple[Array, Array]:
        """Outputs and states of one run from the first state."""
        self.memory.write(self.state, self.first_state)
        self.run()
        c = self.case
        shape = (c.sequences, c.tokens, c.heads, c.dim)
        return self.memory.get(self.out).reshape(shape), self.memory.get(self.state)


def _load(op: KdaStep | KdaChunk, profile: GpuProfile) -> Any:
    """The kernel as a function; it goes through a library, as in a bundle."""
    module = tvm.IRModule({op.key: select(op, profile).func.with_attr("global_symbol", op.key)})
    target = tvm.target.Target(profile.tvm_target())
    with lowering.device_code(profile):
        built = tvm.compile(module, target, tir_pipeline=lowering.register(profile.kind))
    with tempfile.TemporaryDirectory(prefix="k3tvm-") as folder:
        path = Path(folder, "kernel.so")
        built.export_library(str(path))
        return tvm.runtime.load_module(str(path))[op.key]
