"""Compiles a single operator for Apple's GPUs, without a device to run it."""

from __future__ import annotations

from typing import Any

from k3tvm._tvm import tvm
from k3tvm.compiler import lowering
from k3tvm.metal.kernel import MetalKernel
from k3tvm.relax_models.operators import Operator
from k3tvm.schedules import registry
from k3tvm.schedules.profile import GpuProfile


def compile_operator(op: Operator, profile: GpuProfile) -> tuple[Any, list[MetalKernel]]:
    """What can be exported, and the kernels in it."""
    func = registry.select(op, profile).func.with_attr("global_symbol", op.key)
    build = lowering.generator(profile)
    build.register()
    module, target = tvm.IRModule({op.key: func}), tvm.target.Target(profile.tvm_target())
    with build.compiling_for(profile) as kernels:
        made = tvm.compile(module, target=target, tir_pipeline=lowering.register("metal"))
    return made, kernels
