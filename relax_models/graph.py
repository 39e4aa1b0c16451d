"""Builds Relax functions out of operator calls, and records the parameters that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3tvm._tvm import relax, tvm
from k3tvm.relax_models.operators import Arg, Dim, Operator
from k3tvm.relax_models.parameters import Parameter

Expr = Any  # relax.Expr
MAX_SEQUENCES = 256  # of one call


@dataclass(frozen=True)
class Slice:
    """Columns of a [n, width] tensor that start at `offset`."""

    tensor: Expr
    width: int
    offset: int = 0


# (operator, its output) -> the tensor that receives it, instead of a new one
Into = dict[tuple[str, str], Expr]


@dataclass
class Scope:
    """One Relax function while it is built: its symbolic dimensions, inputs and parameters."""

    symbols: dict[str, Any] = field(default_factory=dict)
    inputs: list[Expr] = field(default_factory=list)
    weights: list[tuple[Expr, Parameter]] = field(default_factory=list)
    into: Into = field(default_factory=dict)

    def dim(self, d: Dim) -> Any:
        """An int as it is, a symbol as this function's variable."""
        if isinstance(d, int):
            return d
        return self.symbols.setdefault(d, tvm.tirx.Var(d, "int64"))

    def type_of(self, arg: Arg) -> Any:
        """The Relax tensor type of an operator argument in this function."""
        return relax.TensorType([self.dim(d) for d in arg.shape], arg.dtype)

    def input(self, arg: Arg) -> Expr:
        """A new tensor parameter of the function."""
        var = relax.Var(arg.name, self.type_of(arg))
        self.inputs.append(var)
        return var

    def scalar(self, name: str) -> Expr:
        """A new int64 parameter of the function."""
        var = relax.Var(name, tvm.ir.PrimType("int64"))
        self.inputs.append(var)
        return var

    def weight(self, parameter: Parameter) -> Expr:
        """A new parameter of the function that is read from the bundle."""
        kind = relax.TensorType(list(parameter.shape), parameter.dtype)
        var = relax.Var(parameter.name.replace(".", "_"), kind)
        self.weights.append((var, parameter))
        return var


@dataclass
class Inlined(Scope):
    """A function's body in the middle of another: what it declares is what a call would pass."""

    given: Iterator[Expr] = iter(())

    def input(self, arg: Arg) -> Expr:
        """The next argument."""
        return next(self.given)

    def scalar(self, name: str) -> Expr:
        """The next argument."""
        return next(self.given)

    def weight(self, parameter: Parameter) -> Expr:
        """The next argument."""
        return next(self.given)


Body = Callable[[Scope], Expr]


@dataclass(frozen=True)
class Function:
    """A finished function: its global variable, the weights that follow its inputs, its body."""

    gvar: Any
    weights: tuple[Parameter, ...]
    body: Body


class Graph:
    """An IRModule under construction, and the operators that it calls by key.

    rows: of one call at most.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.builder = relax.BlockBuilder()
        self.operators: dict[str, Operator] = {}
        self.scope = Scope()

    def function(
        self, name: str, body: Body, private: bool, attrs: dict[str, Any] | None = None
    ) -> Function:
        """Build a function: `body` declares inputs and weights, emits calls, returns the result.

        Its parameters are the inputs, then the weights, in order of declaration. No call has more
        than `rows` rows: with that bound memory is planned ahead, and intermediate tensors whose
        lives do not overlap share it.
        """
        self.scope = scope = Scope()
        bound = {"tir_var_upper_bound": {"n": self.rows, "m": MAX_SEQUENCES}}
        with self.builder.function(name, attrs=bound | (attrs or {}), private=private):
            result = body(scope)
            weights = [var for var, _ in scope.weights]
            self.builder.emit_func_output(result, [*scope.inputs, *weights])
        gvar = self.builder.get().get_global_var(name)
        return Function(gvar, tuple(parameter for _, parameter in scope.weights), body)

    def call_function(self, function: Function, arguments: Sequence[Expr]) -> Expr:
        """Call a finished function."""
        return self.builder.emit(relax.Call(function.gvar, list(arguments)))

    def inline(
        self, function: Function, arguments: Sequence[Expr], into: Into | None = None
    ) -> Expr:
        """The same without the call: the body once more, with results put where `into` says."""
        outer, inner = self.scope, Inlined(dict(self.scope.symbols), into=into or {})
        inner.given = iter(arguments)
        self.scope = inner
        try:
            result = function.body(inner)
        finally:
            self.scope = outer
        if inner.into:
            raise KeyError(f"{function.gvar.name_hint} has no {inner.into}")
        return result

    def call(self, op: Operator, *args: Expr, scalars: Sequence[Any] = ()) -> Expr:
        """Call an operator: args are its `in` and `inout` tensors in order.

        Returns its single `out` tensor, a list when it has several, or None. `inout` tensors are
        changed in place. The call is by name: the pipeline puts a kernel there.
        """
        self.operators[op.key] = op
        outs = [a for a in op.arguments() if a.role == "out"]
        inputs = [a for a in op.arguments() if a.role != "out"]
        changed = [i for i, a in enumerate(inputs) if a.role == "inout"]
        kept = [args[i].ty for i in changed]
        types = [self.scope.type_of(a) for a in outs]
        given = [*args, *(relax.prim_value(s) if isinstance(s, int) else s for s in scalars)]
        places = []
        for a in outs:  # those with a place come before the others, as kernels take them
            place = self.scope.into.pop((op.name, a.name), None)
            places.append(-1 if place is None else len(given))
            given += [] if place is None else [place]
        if not changed and places == [-1] * len(outs):
            call = relax.call_dps_packed(op.key, given, out_ty=types)
            return self._outputs(self.builder.emit(call), len(outs), 0)
        call = relax.op.call_inplace_packed(
            op.key, *given, inplace_indices=[*changed, *places], ty_args=[*kept, *types]
        )
        return self._outputs(self.builder.emit(call), len(outs), len(changed))

    def pair(self, first: Expr, second: Expr) -> Expr:
        """Two tensors as one result."""
        return self.builder.emit(relax.Tuple([first, second]))

    def _outputs(self, result: Expr, outs: int, changed: int) -> Expr:
        if outs + changed == 1:
            return result if outs else None
        parts = [self.builder.emit(relax.TupleGetItem(result, changed + i)) for i in range(outs)]
        return (parts[0] if outs == 1 else parts) if parts else None
