"""Operator calls by name become calls of kernels: the phase that knows the target."""

from __future__ import annotations

from typing import Any

from k3tvm._tvm import relax, tvm
from k3tvm.relax_models.operators import Operator
from k3tvm.schedules.profile import TargetProfile
from k3tvm.schedules.registry import Kernel, select


def select_kernels(
    module: Any, operators: dict[str, Operator], profile: TargetProfile
) -> tuple[Any, tuple[Kernel, ...]]:
    """Add one kernel per operator to the module and call it wherever the operator is called.

    Raises TargetError when an operator has no kernel on the target.
    """
    kernels = tuple(select(op, profile) for op in operators.values())
    rewriter = _Rewriter(module)
    for kernel in kernels:
        key = kernel.operator.key
        rewriter.kernels[key] = rewriter.builder_.add_func(kernel.func, key)
    return rewriter.transform(), kernels


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Replaces `call_dps_packed(key, ...)` and `call_inplace_packed(key, ...)` by kernel calls."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.module = module
        self.kernels: dict[str, Any] = {}
        self.dps = tvm.ir.Op.get("relax.call_dps_packed")
        self.inplace = tvm.ir.Op.get("relax.call_inplace_packed")

    def transform(self) -> Any:
        for gvar, func in self.module.functions_items():
            if isinstance(func, relax.Function):
                self.builder_.update_func(gvar, self.visit_expr(func))
        return self.builder_.get()

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if call.op == self.dps:
            kernel = self.kernels[call.args[0].global_symbol]
            return relax.call_tir(kernel, call.args[1], _tensor_types(call.ty_args))
        if call.op == self.inplace:
            kernel = self.kernels[call.args[0].global_symbol]
            indices = [int(i) for i in call.attrs.inplace_indices]
            args = relax.Tuple(list(call.args[1:]))
            return relax.op.call_tir_inplace(kernel, args, indices, _tensor_types(call.ty_args))
        return call


def _tensor_types(types: Any) -> list[Any]:
    """Several outputs come as one tuple type."""
    first = types[0]
    return list(first.fields) if isinstance(first, relax.TupleType) else list(types)
