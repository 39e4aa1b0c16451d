"""A Relax module becomes how often each operator is called in one step of the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from k3tvm._tvm import relax, tvm

PACKED = ("relax.call_dps_packed", "relax.call_inplace_packed")


def calls_of(module: Any, entry: str) -> Counter[str]:
    """Calls by the operator's key, of one call of the function `entry` and all that it calls."""
    found: dict[str, Counter[str]] = {}

    def count(name: str) -> Counter[str]:
        if name not in found:
            found[name] = _calls(module[name], count)
        return found[name]

    return count(entry)


def _calls(function: Any, count: Any) -> Counter[str]:
    total: Counter[str] = Counter()

    def visit(node: Any) -> None:
        if not isinstance(node, relax.Call):
            return
        if isinstance(node.op, tvm.ir.GlobalVar):
            total.update(count(str(node.op.name_hint)))
        elif str(getattr(node.op, "name", "")) in PACKED:
            total[str(node.args[0].global_symbol)] += 1

    relax.analysis.post_order_visit(function, visit)
    return total
