"""GPU kernels in TIR become device functions and the host code that launches them.

TVM's own list of passes is made for schedules with blocks: it moves loops, merges memory and puts
in barriers where its analysis wants them. Our kernels are finished when they arrive here: barriers
stand where the kernel wrote them, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from k3tvm._tvm import tvm
from k3tvm.bundle.manifest import DeviceKernel
from k3tvm.schedules.profile import GpuProfile

PIPELINE = "k3tvm_gpu"


def passes() -> list[Any]:
    """What happens to a kernel before its code is generated, in order."""
    t = tvm.tirx.transform
    return [
        tvm.s_tir.transform.UnifyThreadBinding(),
        t.StmtSimplify(),
        t.LowerTIRxOpaque(),  # launches become attributes
        # buffers of several dimensions become flat, indices as narrow as can be proven
        t.FlattenBuffer(),
        t.NarrowDataType(32),
        t.VectorizeLoop(True),
        t.UnrollLoop(),
        t.StmtSimplify(),
        t.CommonSubexprElim(),
        # each launch becomes a device function
        t.VerifyMemory(),
        t.AnnotateEntryFunc(),
        t.SplitHostDevice(),
        t.MakePackedAPI(),
    ]


def register() -> str:
    """Make the list known to TVM; its name, as `relax.build(tir_pipeline=...)` takes it."""
    from tvm.tirx.compilation_pipeline import (
        PIPELINE_MAP,
        finalize_device_passes_tirx,
        finalize_host_passes,
        register_tir_pipeline,
    )

    if PIPELINE not in PIPELINE_MAP:

        def make() -> tuple[Any, Any, Any]:
            whole = tvm.transform.Sequential(passes())
            return whole, finalize_host_passes, finalize_device_passes_tirx

        register_tir_pipeline(PIPELINE, make)
    return PIPELINE


@contextmanager
def device_code(
    profile: GpuProfile, dump: Path | None = None
) -> Iterator[Callable[[], list[DeviceKernel]]]:
    """Inside, TVM generates code for the profile's kind with our generator.

    Yields a function that lists the kernels that were built. Their sources are written into the
    folder `kernels` of `dump`.
    """
    from k3tvm.vulkan import build, plugin

    plugin.load()
    build.register()
    with ExitStack() as stack:
        built = stack.enter_context(build.compiling_for(profile))
        if dump:
            stack.enter_context(build.dumping(dump / "kernels"))
        yield lambda: [
            DeviceKernel(
                k.name, k.local_size, k.shared_bytes, k.push_bytes, tuple(sorted(k.features))
            )
            for k in built
        ]
