"""Answers "this kernel, because ..." or "none, because ..." for an operator on a target.

Each operator file registers its reference and its schedules with the decorators below. Schedules
of an operator are tried in the order in which they are registered; one that does not fit raises
`Refusal` with the reason.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.errors import TargetError
from k3tvm.relax_models.operators import Arg, Operator
from k3tvm.schedules.profile import TargetProfile

O = TypeVar("O", bound=Operator)  # noqa: E741
Body = Callable[[Any, Any, SimpleNamespace], None]  # the profile is of the schedule's family
Arrays = Mapping[str, np.ndarray]
Reference = Callable[[Any, Any], dict[str, np.ndarray]]

OPERATOR_FILES = (
    "attn_res",
    "elementwise",
    "experts",
    "gpu.attn_res",
    "gpu.elementwise",
    "gpu.experts",
    "gpu.experts_sort",
    "gpu.kda_mma",  # before the chunks without tensor cores
    "gpu.kda_chunk",
    "gpu.kda_fused",
    "gpu.kda_gate",
    "gpu.kda_step",
    "gpu.linear",
    "gpu.mla",
    "gpu.norms",
    "gpu.router",
    "gpu.sampling",
    "gpu.short_conv",
    "kda_chunk",
    "kda_fused",
    "kda_gate",
    "kda_step",
    "linear",
    "mla",
    "norms",
    "router",
    "sampling",
    "short_conv",
)


class Refusal(Exception):
    """A schedule's answer that it does not fit an operator on a target, with the reason."""


@dataclass(frozen=True)
class Schedule:
    """One way to run an operator on one family of targets."""

    operator: type[Operator]
    family: str
    name: str
    reason: str
    body: Body


@dataclass(frozen=True)
class Kernel:
    """The answer: a kernel for an operator, who made it and why it was chosen."""

    operator: Operator
    schedule: str
    reason: str
    func: Any  # tvm.tirx.PrimFunc


_schedules: list[Schedule] = []
_references: dict[type[Operator], Reference] = {}


def schedule(operator: type[Operator], family: str, reason: str) -> Callable[[Body], Body]:
    """Register `body(op, profile, args)` as a way to run `operator` on a family of targets.

    The body emits TIR. `args` has one attribute per tensor and scalar of the operator, and one per
    symbolic dimension (`args.n`). It raises `Refusal` when the operator or profile does not fit.
    """

    def register(body: Body) -> Body:
        name = f"{body.__module__.rsplit('.', 1)[-1]}.{body.__name__}"
        _schedules.append(Schedule(operator, family, name, reason, body))
        return body

    return register


def reference(operator: type[Operator]) -> Callable[[Reference], Reference]:
    """Register `ref(op, args)`, float64 NumPy, as what every kernel of the operator must compute.

    `args` has one array per input tensor (as the kernel gets it) and one int per scalar; the
    result has one array per `inout` and `out` tensor. Inputs are not modified.
    """

    def register(function: Reference) -> Reference:
        _references[operator] = function
        return function

    return register


@cache
def _load_operator_files() -> None:
    for name in OPERATOR_FILES:
        importlib.import_module(f"k3tvm.schedules.{name}")


def reference_of(operator: Operator) -> Reference:
    """The NumPy reference of an operator."""
    _load_operator_files()
    return _references[type(operator)]


def build_function(op: Operator, profile: TargetProfile, body: Body) -> Any:
    """Emit a PrimFunc for `op`: parameters from its arguments and scalars, then the body."""
    symbols: dict[str, Any] = {}
    args = op.arguments()
    names: dict[str, Any] = {}
    with IRBuilder() as builder, T.prim_func():
        T.func_name(op.key)
        T.func_attr({"tirx.noalias": True, "op_pattern": 8})
        handles = [(a, T.arg(a.name, T.handle())) for a in args if a.role != "out"]
        names |= {s: T.arg(s, tvm.tirx.Var(s, "int64")) for s in op.scalars}
        handles += [(a, T.arg(a.name, T.handle())) for a in args if a.role == "out"]
        for a, handle in handles:
            buffer = T.match_buffer(handle, _shape(a, profile, symbols), a.dtype)
            names[a.name] = IRBuilder.name(a.name, buffer)
        if profile.family == "gpu":
            names |= {s: _narrow(names[s]) for s in op.scalars}
        body(op, profile, SimpleNamespace(**names, **symbols))
    return builder.get()


def _narrow(scalar: Any) -> Any:
    """A scalar argument in 32 bits, through host memory: else the device would do the cast."""
    cell = T.alloc_buffer((1,), "int32", scope="local")
    T.buffer_store(cell, T.Cast("int32", scalar), [0])
    return T.Bind(cell[0])


def _index(profile: TargetProfile) -> str:
    """The type of sizes."""
    return "int32" if profile.family == "gpu" else "int64"


def _shape(arg: Arg, profile: TargetProfile, symbols: dict[str, Any]) -> tuple[Any, ...]:
    """The shape of an argument in TIR; one variable per symbol.

    GPUs count in 32 bits, which is several times faster there, except inside of tensors that have
    more elements than that; kernels make the first index of such a tensor 64-bit (`gpu.grid.wide`).
    """
    symbol = _index(profile)
    known = math.prod(d for d in arg.shape if isinstance(d, int))
    static = T.int32 if symbol == "int32" and known < 2**31 else T.int64

    def dim(d: int | str) -> Any:
        if isinstance(d, int):
            return static(d)
        return symbols.setdefault(d, tvm.tirx.Var(d, symbol))

    return tuple(dim(d) for d in arg.shape)


@cache
def select(op: Operator, profile: TargetProfile) -> Kernel:
    """The first schedule that fits; TargetError with every refusal when none does."""
    _load_operator_files()
    refusals = []
    for s in _schedules:
        if s.operator is not type(op):
            continue
        if s.family != profile.family:
            refusals.append(f"{s.name}: is for {s.family}")
            continue
        try:
            return Kernel(op, s.name, s.reason, build_function(op, profile, s.body))
        except Refusal as refusal:
            refusals.append(f"{s.name}: {refusal}")
    reasons = "; ".join(refusals) or "no schedule is registered"
    raise TargetError(f"no kernel for {profile.name}: {reasons}", where=op.key)
