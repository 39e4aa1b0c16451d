"""A Relax module becomes how often each operator is called in one step, and with which rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from k3tvm._tvm import relax, tvm
from k3tvm.bundle.kernels import Point
from k3tvm.relax_models.operators import Operator

PACKED = ("relax.call_dps_packed", "relax.call_inplace_packed")


@dataclass(frozen=True)
class Calls:
    """Of one step: calls by the operator's key, and symbols in the shapes of their results."""

    count: Counter[str] = field(default_factory=Counter)
    symbols: dict[str, set[str]] = field(default_factory=dict)

    def add(self, other: Calls) -> None:
        """Count those of another function, too."""
        self.count.update(other.count)
        for key, names in other.symbols.items():
            self.symbols.setdefault(key, set()).update(names)

    def point_of(self, op: Operator, point: Point) -> Point:
        """The point as an operator meets it: behind the last rows a row is a sequence."""
        many = any("n" in a.shape for a in op.arguments() if a.role == "out")
        if many and "n" not in self.symbols.get(op.key, {"n"}):
            return replace(point, rows=point.sequences)
        return point


def calls_of(module: Any, entry: str) -> Calls:
    """Calls of one call of the function `entry` and all that it calls."""
    found: dict[str, Calls] = {}

    def of(name: str) -> Calls:
        if name not in found:
            found[name] = _calls(module[name], of)
        return found[name]

    return of(entry)


def _calls(function: Any, of: Callable[[str], Calls]) -> Calls:
    total = Calls()

    def visit(node: Any) -> None:
        if not isinstance(node, relax.Call):
            return
        if isinstance(node.op, tvm.ir.GlobalVar):
            total.add(of(str(node.op.name_hint)))
        elif str(getattr(node.op, "name", "")) in PACKED:
            key = str(node.args[0].global_symbol)
            total.add(Calls(Counter({key: 1}), {key: _symbols(node)}))

    relax.analysis.post_order_visit(function, visit)
    return total


def _symbols(call: Any) -> set[str]:
    """Names of the symbolic sizes of a call's results."""
    return {str(v.name) for t in call.ty_args for v in relax.analysis.tir_vars_in_type(t)}
