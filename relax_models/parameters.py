"""Where every kernel parameter comes from: checkpoint tensors and the recipe that combines them.

The plan is made while the model is built, so it cannot disagree with the kernels: each weight
argument of an operator is recorded with its shape, its dtype and its sources. What a recipe does
is written in `k3tvm.compiler.convert`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from k3tvm.relax_models.operators import WeightFormat

Recipe = Literal[
    "vector",  # one tensor, flattened, float32
    "product",  # elementwise product of two tensors in float32: res_norm * res_proj
    "exp_heads",  # exp of A_log, its first `rows` values (specification 7.1)
    "conv",  # depthwise filters [C, 1, taps] of all sources -> [taps, sum of C] float32
    "table",  # row-major matrix, stored dtype
    "rows",  # matrices stacked along the rows, packed
    "absorb_key",  # kv_b -> per head the key rows, transposed, packed
    "absorb_value",  # kv_b -> per head the value rows, packed
    "expert_rows",  # per expert: matrices stacked along the rows, packed
    "zeros",  # no source: an argument that this model does not use
]
Part = Literal["values", "scales"]

FormatOf = Callable[[str], WeightFormat]
"""Weight format of a checkpoint matrix, by its name without `.weight`."""


@dataclass(frozen=True)
class Parameter:
    """One array that kernels read.

    shape, dtype: as the kernel takes it. sources: checkpoint names without `.weight` for matrices,
    whole names otherwise; `{expert}` in them runs over `experts`. rows: logical rows before
    padding (per head for absorb_*, per expert for expert_rows). part: codes or scales of MXFP4.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    recipe: Recipe
    sources: tuple[str, ...]
    fmt: WeightFormat = "float32"
    rows: int = 0
    experts: int = 0
    split: int = 0
    part: Part = "values"

    def placed(self, prefix: str, layer: int = 0) -> Parameter:
        """The same parameter at its place in the model: name prefixed, `{layer}` filled in."""
        sources = tuple(s.replace("{layer}", str(layer)) for s in self.sources)
        return replace(self, name=f"{prefix}.{self.name}", sources=sources)
