"""Turns a Checkpoint into facts: counts, bytes, and whether it would compile."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from k3tvm.checkpoint.checkpoint import Checkpoint, Source
from k3tvm.checkpoint.collector import paused
from k3tvm.checkpoint.diagnosis import explain
from k3tvm.checkpoint.expected import TensorSpec
from k3tvm.relax_models.config import Family, ModelConfig


@dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint. Counts are of tensors, `parameters` of weights.

    `bytes` is the text model's stored size and `total_bytes` that of everything, skipped tensors
    included; the latter two are None when neither headers nor the index tell. `stated_bytes` is
    the total that the index states, which need not be right. `bytes_per_token`
    counts the weights that decoding one token must read: all but the embedding table, of which
    one row, and the routed experts, of which the chosen ones.
    """

    path: str
    source: Source
    family: Family
    tensors: int
    text_tensors: int
    missing: int
    unexpected: int
    skipped: int
    parameters: int
    active_parameters: int
    bytes: int
    skipped_bytes: int | None
    total_bytes: int | None
    stated_bytes: int | None
    bytes_per_token: int
    bytes_by_kind: dict[str, int]
    experts: str
    compiles: bool
    problem: str | None
    examples: dict[str, list[str]]
    config: dict[str, Any]


@paused()
def inspect_checkpoint(checkpoint: Checkpoint, examples: int = 5) -> Facts:
    """Facts of an opened checkpoint; `examples` names at most are listed of each irregular kind."""
    sizes = [(spec, checkpoint.nbytes(spec)) for spec in checkpoint.specs]
    counts = [(spec, spec.parameters) for spec in checkpoint.specs]
    text = sum(size for _, size in sizes)
    skipped, total = _whole(checkpoint, text)
    fits = not (checkpoint.missing or checkpoint.unexpected or checkpoint.misfits)
    irregular = {
        "missing": checkpoint.missing,
        "unexpected": checkpoint.unexpected,
        "misfits": checkpoint.misfits,
    }
    present = len(checkpoint.specs) - len(checkpoint.missing)
    return Facts(
        path=str(checkpoint.path),
        source=checkpoint.source,
        family=checkpoint.config.family,
        tensors=present + len(checkpoint.unexpected) + len(checkpoint.skipped),
        text_tensors=len(checkpoint.specs),
        missing=len(checkpoint.missing),
        unexpected=len(checkpoint.unexpected),
        skipped=len(checkpoint.skipped),
        parameters=sum(count for _, count in counts),
        active_parameters=round(_touched(checkpoint.config, counts)),
        bytes=text,
        skipped_bytes=skipped,
        total_bytes=total,
        stated_bytes=checkpoint.total_size,
        bytes_per_token=round(_touched(checkpoint.config, sizes)),
        bytes_by_kind=_by_kind(sizes),
        experts=_expert_form(checkpoint.config),
        compiles=fits,
        problem=None if fits else "; ".join(explain(checkpoint)),
        examples={kind: list(names[:examples]) for kind, names in irregular.items()},
        config=summary(checkpoint.config),
    )


def summary(config: ModelConfig) -> dict[str, Any]:
    """The configuration as plain JSON values, layer kinds shortened to counts."""
    values = asdict(config)
    kinds = values.pop("layer_kinds")
    dense = sum(config.ffn_kind(layer) == "dense" for layer in range(config.num_layers))
    counts = {"kda_layers": kinds.count("kda"), "mla_layers": kinds.count("mla")}
    return values | counts | {"dense_layers": dense, "moe_layers": config.num_layers - dense}


def _whole(checkpoint: Checkpoint, text: int) -> tuple[int | None, int | None]:
    """Bytes of the skipped tensors and of everything: from headers, or from the index's total."""
    if checkpoint.has_data:
        skipped = sum(checkpoint.tensors[name].nbytes for name in checkpoint.skipped)
        return skipped, sum(info.nbytes for info in checkpoint.tensors.values())
    if checkpoint.source == "index" and not checkpoint.skipped:
        return 0, text
    if checkpoint.total_size is None:
        return None, None
    return checkpoint.total_size - text, checkpoint.total_size


def _touched(config: ModelConfig, sizes: list[tuple[TensorSpec, int]]) -> float:
    total = 0.0
    for spec, size in sizes:
        if spec.role == "embedding":
            total += size / config.vocab_size
        elif spec.expert is not None:
            total += size * config.experts_per_token / config.num_experts
        else:
            total += size
    return total


def _by_kind(sizes: list[tuple[TensorSpec, int]]) -> dict[str, int]:
    found: defaultdict[str, int] = defaultdict(int)
    for spec, size in sizes:
        found[spec.role.partition(".")[0]] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _expert_form(config: ModelConfig) -> str:
    if not config.num_experts:
        return "none"
    return "MXFP4" if config.mxfp4_experts else "plain"
