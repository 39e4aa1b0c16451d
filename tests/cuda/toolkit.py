"""What tests of the CUDA toolchain share: the toolkit, and the compilation of one operator."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from k3tvm._tvm import tvm
from k3tvm.compiler import lowering
from k3tvm.cuda.kernel import CudaKernel
from k3tvm.cuda.tools import Toolkit, find_toolkit
from k3tvm.errors import TargetError
from k3tvm.relax_models.operators import Operator
from k3tvm.schedules import registry
from k3tvm.schedules.profile import GpuProfile


@cache
def _found() -> Toolkit | str:
    try:
        return find_toolkit()
    except TargetError as error:
        return str(error)


def require_toolkit() -> Toolkit:
    """The toolkit; without one the test is skipped, or fails in CI."""
    found = _found()
    if isinstance(found, str):
        if os.environ.get("CI"):
            pytest.fail(found)
        pytest.skip(found)
    return found


def compile_operator(op: Operator, profile: GpuProfile) -> tuple[Any, list[CudaKernel]]:
    """What can be exported, and the kernels in it."""
    func = registry.select(op, profile).func.with_attr("global_symbol", op.key)
    build = lowering.generator(profile)
    build.register()
    module, target = tvm.IRModule({op.key: func}), tvm.target.Target(profile.tvm_target())
    with build.compiling_for(profile) as kernels:
        made = tvm.compile(module, target=target, tir_pipeline=lowering.register("cuda"))
    return made, kernels


def shared_library(source: str, path: Path) -> Path:
    """A library of C code."""
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)
    return path
