"""The compile pipeline as one visible list: named operators in Relax become an executable.

Read `phases` from top to bottom to know what happens to a module. `--dump DIR` writes the module
after each phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tvm._tvm import relax, tvm
from k3tvm.bundle.kernels import DeviceKernel, Minimum, Point
from k3tvm.compiler import lowering
from k3tvm.compiler.generation import Progress
from k3tvm.compiler.select import select_kernels
from k3tvm.relax_models.operators import Operator
from k3tvm.report.describe import describe
from k3tvm.schedules.profile import GpuProfile, TargetProfile
from k3tvm.schedules.registry import Kernel

# It looks for the used parts of buffers, of which kernels use all, and costs a quarter of the time.
DISABLED = ["s_tir.CompactBufferAllocation"]


@dataclass(frozen=True)
class Compiled:
    """An executable for a target and the kernels that went into it.

    points, minima: of GPU code, what the traffic of kernels is given for, and the least of it by
    the operator's key.
    """

    profile: TargetProfile
    executable: Any
    kernels: tuple[Kernel, ...]
    device_kernels: tuple[DeviceKernel, ...] = ()
    points: tuple[Point, ...] = ()
    minima: Mapping[str, tuple[Minimum, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """A named step from module to module."""

    name: str
    apply: Callable[[Any], Any]


def phases(profile: TargetProfile) -> list[Phase]:
    """What follows kernel selection: Relax is lowered to calls of the virtual machine."""
    t = relax.transform
    steps: Sequence[tuple[str, Any]] = (
        # calls become allocations and plain calls; nothing has effects that Relax could see
        ("to_non_dataflow", t.ToNonDataflow()),
        ("remove_purity_checking", t.RemovePurityChecking()),
        ("call_tir_rewrite", t.CallTIRRewrite()),
        # memory: intermediate tensors whose lives do not overlap share storage
        ("static_plan_block_memory", t.StaticPlanBlockMemory()),
        *([("rewrite_cuda_graph", _rewrite_cuda_graph)] if profile.captured else []),
        ("lower_alloc_tensor", t.LowerAllocTensor()),
        ("kill_after_last_use", t.KillAfterLastUse()),
        # the virtual machine: builtins, shape arithmetic, symbols
        ("lower_runtime_builtin", t.LowerRuntimeBuiltin()),
        ("compute_prim_value", t.ComputePrimValue()),
        ("vm_shape_lower", t.VMShapeLower()),
        ("attach_global_symbol", t.AttachGlobalSymbol()),
    )
    return [Phase(name, apply) for name, apply in steps]


def _rewrite_cuda_graph(module: Any) -> Any:
    """Calls whose memory never moves become functions that are captured once and then replayed."""
    with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
        return relax.transform.RewriteCUDAGraph()(module)


def compile_module(
    module: Any,
    operators: dict[str, Operator],
    profile: TargetProfile,
    dump: Path | None = None,
    progress: Progress = lambda message: None,
) -> Compiled:
    """Compile a module whose operator calls are by name (`k3tvm.relax_models.graph`).

    Raises TargetError when an operator has no kernel on the target.
    """
    writer, model = _Dump(dump), module
    writer.write("model", module)
    progress("selecting kernels")
    module, kernels = select_kernels(module, operators, profile)
    writer.write("select_kernels", module)
    with tvm.target.Target(profile.tvm_target()):
        for phase in phases(profile):
            progress(f"lowering: {phase.name}")
            module = phase.apply(module)
            writer.write(phase.name, module)
    progress(f"building {len(kernels)} kernels for {profile.name}")
    executable, device_kernels = _build(module, profile, dump, progress)
    if not isinstance(profile, GpuProfile) or profile.emulated:
        return Compiled(profile, executable, kernels, device_kernels)
    progress("counting what kernels move")
    found = describe(model, kernels, device_kernels, profile)
    if found.unknown:
        progress(f"not counted, for launches that TVM left out: {', '.join(found.unknown)}")
    return Compiled(profile, executable, kernels, found.device_kernels, found.points, found.minima)


def _build(
    module: Any, profile: TargetProfile, dump: Path | None, progress: Progress
) -> tuple[Any, tuple[DeviceKernel, ...]]:
    """Generate the code of a lowered module: the executable, and what runs on a GPU."""
    target = tvm.target.Target(profile.tvm_target())
    nothing = tvm.transform.Sequential([])
    if isinstance(profile, GpuProfile):
        with lowering.device_code(profile, dump, progress) as built:
            executable = relax.build(
                module,
                target,
                relax_pipeline=nothing,
                tir_pipeline=lowering.register(profile.kind),
                system_lib=profile.platform == "ios",  # an app links it
            )
        return executable, tuple(k.entry() for k in built)
    with tvm.transform.PassContext(disabled_pass=DISABLED):
        return relax.build(module, target, relax_pipeline=nothing), ()


class _Dump:
    """Writes numbered module texts into a directory, or nothing."""

    def __init__(self, directory: Path | None) -> None:
        self.directory, self.count = directory, 0
        if directory:
            directory.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, module: Any) -> None:
        if self.directory:
            text = module.script(show_meta=False)
            (self.directory / f"{self.count:02d}_{name}.py").write_text(text)
            self.count += 1
