"""How each checkpoint matrix is stored, decided by what is there (never by an ignore list)."""

from __future__ import annotations

from collections.abc import Iterator

from k3tvm.checkpoint.checkpoint import Checkpoint
from k3tvm.relax_models.operators import WeightFormat
from k3tvm.relax_models.parameters import FormatOf

# F16 has no kernel of its own; widening it to float32 is exact.
BY_DTYPE: dict[str, WeightFormat] = {"BF16": "bfloat16", "F32": "float32", "F16": "float32"}


def formats_of(checkpoint: Checkpoint) -> FormatOf:
    """The storage format of a matrix by its stem; from headers, or as published without shards.

    The experts of a layer share a kernel, so expert 0 answers for all: where they differ, float32.
    """

    def format_of(stem: str) -> WeightFormat:
        if f"{stem}.weight_packed" in checkpoint.by_name:
            return "mxfp4"
        found = {_stored(checkpoint, f"{name}.weight") for name in _alike(checkpoint, stem)}
        return found.pop() if len(found) == 1 else "float32"

    return format_of


def _alike(checkpoint: Checkpoint, stem: str) -> Iterator[str]:
    start, experts, end = stem.partition(".experts.0.")
    if not experts:
        yield stem
    else:
        yield from (f"{start}.experts.{e}.{end}" for e in range(checkpoint.config.num_experts))


def _stored(checkpoint: Checkpoint, name: str) -> WeightFormat:
    info = checkpoint.tensors.get(name)
    return BY_DTYPE[info.dtype if info else checkpoint.by_name[name].dtypes[0]]
