"""How each checkpoint matrix is stored, decided by what is there (never by an ignore list)."""

from __future__ import annotations

from k3tvm.checkpoint.checkpoint import Checkpoint
from k3tvm.relax_models.operators import WeightFormat
from k3tvm.relax_models.parameters import FormatOf

# F16 has no kernel of its own; widening it to float32 is exact.
BY_DTYPE: dict[str, WeightFormat] = {"BF16": "bfloat16", "F32": "float32", "F16": "float32"}


def formats_of(checkpoint: Checkpoint) -> FormatOf:
    """The storage format of a matrix by its stem; from headers, or as published without shards."""

    def format_of(stem: str) -> WeightFormat:
        if f"{stem}.weight_packed" in checkpoint.by_name:
            return "mxfp4"
        name = f"{stem}.weight"
        info = checkpoint.tensors.get(name)
        return BY_DTYPE[info.dtype if info else checkpoint.by_name[name].dtypes[0]]

    return format_of
