"""Turns the difference between checkpoint and configuration into one line with its likely cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from k3tvm.checkpoint.listing import some

if TYPE_CHECKING:
    from k3tvm.checkpoint.checkpoint import Checkpoint


def explain(checkpoint: Checkpoint) -> tuple[str, str]:
    """What is wrong (counts and first names) and what to do, for a checkpoint that does not fit."""
    groups = (
        ("missing", checkpoint.missing),
        ("not expected", checkpoint.unexpected),
        ("of the wrong form", checkpoint.misfits),
    )
    facts = [f"{len(names)} tensors {kind} ({some(names)})" for kind, names in groups if names]
    causes = (cure for applies, cure in CAUSES if applies(checkpoint))
    return ", ".join(facts), next(causes, LAST_RESORT)


def _prefix_differs(checkpoint: Checkpoint) -> bool:
    prefix = "language_model."
    swapped = {name.removeprefix(prefix) for name in checkpoint.missing}
    found = {name.removeprefix(prefix) for name in checkpoint.unexpected}
    return bool(swapped & found)


def _packed_outside_experts(checkpoint: Checkpoint) -> bool:
    packed = [name for name in checkpoint.unexpected if name.endswith(".weight_packed")]
    return any(".experts." not in name for name in packed)


def _mixed_experts(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.mxfp4_experts and any(
        ".experts." in name and name.endswith(".weight") for name in checkpoint.unexpected
    )


def _mentions(*parts: str) -> Callable[[Checkpoint], bool]:
    return lambda checkpoint: any(
        part in name for name in checkpoint.missing + checkpoint.unexpected for part in parts
    )


def _layer_beyond(checkpoint: Checkpoint) -> bool:
    start = f"{checkpoint.config.tensor_prefix}model.layers."
    numbers = (
        name.removeprefix(start).partition(".")[0]
        for name in checkpoint.unexpected
        if name.startswith(start)
    )
    return any(text.isdecimal() and int(text) >= checkpoint.config.num_layers for text in numbers)


def _expert_beyond(checkpoint: Checkpoint) -> bool:
    numbers = (name.partition(".experts.")[2].partition(".")[0] for name in checkpoint.unexpected)
    return any(text.isdecimal() and int(text) >= checkpoint.config.num_experts for text in numbers)


def _whole_experts_lost(checkpoint: Checkpoint) -> bool:
    lost = checkpoint.missing
    return bool(lost) and not checkpoint.unexpected and all(".experts." in name for name in lost)


# The first cause that applies is reported; the specific ones stand before the general ones.
CAUSES: tuple[tuple[Callable[[Checkpoint], bool], str], ...] = (
    (
        _prefix_differs,
        "only the prefix 'language_model.' differs: use the config.json of this checkpoint "
        "(nested 'text_config' with the prefix, flat without)",
    ),
    (_packed_outside_experts, "only routed experts may be MXFP4: leave the other weights BF16"),
    (_mixed_experts, "all routed experts must have one form, MXFP4 or plain: convert them alike"),
    (_layer_beyond, "the checkpoint has more layers than 'num_hidden_layers' says"),
    (_expert_beyond, "the checkpoint has more experts than 'num_experts' says"),
    (_mentions("_res_norm.", "_res_proj."), "check 'attn_res_block_size' in config.json"),
    (_mentions(".g_a_proj.", ".g_b_proj."), "check 'use_full_rank_gate' in config.json"),
    (
        _mentions(".self_attn."),
        "check 'kda_layers', 'q_lora_rank' and the output gates in config.json, "
        "or download the checkpoint again",
    ),
    (_mentions("routed_expert_"), "check 'routed_expert_hidden_size' in config.json"),
    (
        lambda checkpoint: bool(checkpoint.missing and checkpoint.unexpected),
        "were tensors renamed? the published names are needed",
    ),
    (
        lambda checkpoint: bool(checkpoint.unexpected),
        "nothing in config.json asks for them: use the config.json of this checkpoint",
    ),
    (_whole_experts_lost, "were experts pruned? then 'num_experts' must say how many are left"),
    (
        lambda checkpoint: bool(checkpoint.misfits),
        "use the config.json that belongs to this checkpoint",
    ),
)
LAST_RESORT = "the download is incomplete: fetch the checkpoint again"
