"""Runs one operator's kernel on a target and its NumPy reference on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm import emulate
from k3tvm._tvm import tvm
from k3tvm.compiler import lowering
from k3tvm.compiler.targets.cpu import cpu_profile
from k3tvm.compiler.targets.cuda import cuda_emulated_profile
from k3tvm.compiler.targets.metal import metal_emulated_profile
from k3tvm.compiler.targets.vulkan import vulkan_profile
from k3tvm.relax_models.operators import Arg, Operator
from k3tvm.runtime.cpu import NEEDS, host_features
from k3tvm.schedules import registry
from k3tvm.schedules.profile import CpuProfile, GpuProfile, TargetProfile
from k3tvm.vulkan import plugin
from tests.devices import require


def host_profiles() -> list[TargetProfile]:
    """Every CPU profile that this machine can execute, the portable one first."""
    able = [isa for isa, needs in NEEDS.items() if needs <= host_features()]
    return [cpu_profile(isa) for isa in reversed(able)]


def gpu_profiles() -> list[GpuProfile]:
    """Every GPU profile that kernels are tested with: all run on the CPU."""
    return [vulkan_profile("lavapipe"), *emulated_profiles()]


def emulated_profiles() -> list[GpuProfile]:
    """CUDA and Metal, emulated."""
    return [cuda_emulated_profile(), metal_emulated_profile()]


def profiles() -> list[TargetProfile]:
    """All of them."""
    return [*host_profiles(), *gpu_profiles()]


@cache
def compiled(op: Operator, profile: TargetProfile) -> Any:
    """The kernel of `op` as a callable TVM function."""
    func = registry.select(op, profile).func
    return compiled_function(op.key, func, profile)


def compiled_function(name: str, func: Any, profile: TargetProfile) -> Any:
    """A PrimFunc as a callable TVM function."""
    return compiled_module(name, func, profile)[name]


def device_functions(op: Operator, profile: GpuProfile) -> list[Any]:
    """What the code generator made of an operator, one entry per launch."""
    prepare(profile)
    return compile_operator(op, profile)[1]


def compile_operator(op: Operator, profile: GpuProfile) -> tuple[Any, list[Any]]:
    """An operator as a module that can be exported, and the kernels in it; needs no device."""
    func = registry.select(op, profile).func
    module = tvm.IRModule({op.key: _named(op.key, func)})
    target = tvm.target.Target(profile.tvm_target())
    with lowering.device_code(profile) as built:
        made = tvm.compile(module, target, tir_pipeline=lowering.register(profile.kind))
    return made, built


def _named(name: str, func: Any) -> Any:
    return func.with_attr("global_symbol", name)


def compiled_module(name: str, func: Any, profile: TargetProfile) -> Any:
    """A PrimFunc as a module that can be exported."""
    module = tvm.IRModule({name: _named(name, func)})
    target = tvm.target.Target(profile.tvm_target())
    if isinstance(profile, CpuProfile):
        return tvm.compile(module, target=target)
    prepare(profile)
    with lowering.device_code(profile):
        return tvm.compile(module, target, tir_pipeline=lowering.register(profile.kind))


def prepare(profile: GpuProfile) -> None:
    """Make the device that runs a profile's code one that TVM knows."""
    require(profile.code_kind)
    if profile.kind == "vulkan":
        plugin.load()
    else:
        emulate.install(profile.kind)


def device_of(profile: TargetProfile) -> Any:
    """The TVM device that runs a profile's kernels."""
    return tvm.device("cpu" if profile.family == "cpu" else profile.kind, 0)


def run(
    op: Operator,
    profile: TargetProfile,
    inputs: Mapping[str, np.ndarray],
    scalars: Mapping[str, int] | None = None,
    **symbols: int,
) -> dict[str, np.ndarray]:
    """Run the kernel; returns every `inout` and `out` array. Outputs start as NaN or -1."""
    sizes = _symbols(op, inputs) | symbols
    kernel, device = compiled(op, profile), device_of(profile)
    tensors = {a.name: tvm.runtime.tensor(_array(a, inputs, sizes), device) for a in op.arguments()}
    given = [tensors[a.name] for a in op.arguments() if a.role != "out"]
    outs = [tensors[a.name] for a in op.arguments() if a.role == "out"]
    values = scalars or {}
    kernel(*given, *(values[s] for s in op.scalars), *outs)
    return {a.name: tensors[a.name].numpy() for a in op.arguments() if a.role != "in"}


def expect(
    op: Operator, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """What the NumPy reference gives for the same inputs."""
    return registry.reference_of(op)(op, SimpleNamespace(**inputs, **(scalars or {})))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """max |got - want| / max |want|; NaN in `got` gives infinity."""
    if not np.isfinite(got).all():
        return float("inf")
    scale = np.abs(want).max(initial=0.0) or 1.0
    return float(np.abs(got - want).max(initial=0.0) / scale)


def _symbols(op: Operator, inputs: Mapping[str, np.ndarray]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for a in op.arguments():
        if a.name in inputs:
            shape = inputs[a.name].shape
            sizes |= {d: s for d, s in zip(a.shape, shape, strict=True) if isinstance(d, str)}
    return sizes


def _array(a: Arg, inputs: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    if a.role != "out":
        array = inputs[a.name]
        if array.dtype != np.dtype(a.dtype):
            raise TypeError(f"{a.name}: {array.dtype}, the operator takes {a.dtype}")
        return np.ascontiguousarray(array)
    shape = [d if isinstance(d, int) else sizes[d] for d in a.shape]
    return np.full(shape, np.nan if a.dtype == "float32" else -1, a.dtype)
