"""Functions that generated GLSL calls where the language has none, or none that is exact enough."""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.vulkan.glsl import functions
from k3tvm.vulkan.glsl.types import LANES, DType


@dataclass(frozen=True)
class Helper:
    """GLSL text of a scalar function; TYPE stands for its type.

    arguments: how many it has. result: the type of the result if it is another. needs: helpers that
    it calls.
    """

    arguments: int
    text: str
    result: str = ""
    needs: tuple[str, ...] = ()


INTEGER = {
    "k3_tmod": Helper(2, "TYPE k3_tmod(TYPE a, TYPE b) { return a - (a / b) * b; }"),
}

FLOAT = {
    "k3_tmod": Helper(2, "TYPE k3_tmod(TYPE a, TYPE b) { return a - trunc(a / b) * b; }"),
    "k3_exp": Helper(1, functions.EXP),
    "k3_log": Helper(1, functions.LOG),
    "k3_pow": Helper(2, functions.POW, needs=("k3_exp", "k3_log")),
    "k3_tanh": Helper(1, functions.TANH, needs=("k3_exp",)),
    "k3_erf": Helper(1, functions.ERF, needs=("k3_exp",)),
    "k3_sigmoid": Helper(1, functions.SIGMOID, needs=("k3_exp",)),
    "k3_isnan": Helper(1, functions.ISNAN, result="bool"),
    "k3_isinf": Helper(1, functions.ISINF, result="bool"),
}


def definition(name: str, kind: DType) -> list[str]:
    """The text of a helper for a type, after what it needs; vectors go lane by lane."""
    helper = (FLOAT if kind.is_float else INTEGER)[name]
    texts = [text for need in helper.needs for text in definition(need, kind.scalar)]
    texts.append(helper.text.replace("TYPE", kind.scalar.glsl))
    if kind.lanes > 1:
        texts.append(_by_lanes(name, helper, kind))
    return texts


def _by_lanes(name: str, helper: Helper, kind: DType) -> str:
    result = DType(helper.result or kind.base, kind.lanes).glsl
    names = "ab"[: helper.arguments]
    parameters = ", ".join(f"{kind.glsl} {n}" for n in names)
    calls = ", ".join(
        f"{name}({', '.join(f'{n}.{lane}' for n in names)})" for lane in LANES[: kind.lanes]
    )
    return f"{result} {name}({parameters}) {{ return {result}({calls}); }}"
