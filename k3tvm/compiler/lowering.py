"""GPU kernels in TIR become device functions and the host code that launches them.

TVM's own list of passes is made for schedules with blocks: it moves loops, merges memory and puts
in barriers where its analysis wants them. Our kernels are finished when they arrive here: barriers
stand where the kernel wrote them, and nothing is moved.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3tvm._tvm import tvm
from k3tvm.compiler.generation import Generation, Progress, generating
from k3tvm.schedules.profile import GpuKind, GpuProfile

PIPELINE = "k3tvm_gpu"  # and the kind


def passes(kind: GpuKind) -> list[Any]:
    """What happens to a kernel before its code is generated, in order.

    Common subexpressions are left to the compilers of CUDA and Metal: TVM's pass names the index of
    a vector access, and TVM's generators of those two languages then access lane by lane.
    """
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
        *([t.CommonSubexprElim()] if kind == "vulkan" else []),
        # each launch becomes a device function
        t.VerifyMemory(),
        t.AnnotateEntryFunc(),
        t.SplitHostDevice(),
        t.MakePackedAPI(),
    ]


def register(kind: GpuKind) -> str:
    """Make the list known to TVM; its name, as `relax.build(tir_pipeline=...)` takes it."""
    from tvm.tirx.compilation_pipeline import (
        PIPELINE_MAP,
        finalize_device_passes_tirx,
        finalize_host_passes,
        register_tir_pipeline,
    )

    name = f"{PIPELINE}_{kind}"
    if name not in PIPELINE_MAP:

        def make() -> tuple[Any, Any, Any]:
            whole = tvm.transform.Sequential(passes(kind))
            return whole, finalize_host_passes, finalize_device_passes_tirx

        register_tir_pipeline(name, make)
    return name


@contextmanager
def device_code(
    profile: GpuProfile, dump: Path | None = None, progress: Progress = lambda message: None
) -> Iterator[list[Any]]:
    """Inside, TVM generates code for the profile's kind with our generator.

    Yields a list that receives every kernel that is built; each has `entry()`, its `DeviceKernel`.
    Sources, and what compilers make of them, are written into the folder `kernels` of `dump`.
    """
    generator(profile).register()
    work = Generation(profile, dump / "kernels" if dump else None, progress)
    with generating(work):
        yield work.kernels


def generator(profile: GpuProfile) -> Any:
    """The module that turns device functions into code: `build.py` of the profile's kind.

    It has `check_tools(profile)`, which raises what would stop it later, and `register()`, which
    makes TVM use it.
    """
    return importlib.import_module(f"k3tvm.{profile.kind}.build")
