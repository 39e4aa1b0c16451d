"""Turns the feed-forward fields into the sizes of dense layers, experts and their router."""

from __future__ import annotations

from typing import Any

from k3tvm.relax_models.config_reader import (
    Fields,
    above_zero,
    boolean,
    natural,
    only,
    optional,
    positive,
)
from k3tvm.relax_models.config_tables import MOE_FIELDS

Parts = dict[str, Any]


def feed_forward(fields: Fields, is_k3: bool) -> Parts:
    """Feed-forward sizes; `num_experts` 0, null or not spoken of at all makes a dense model.

    `is_k3` says that the latent width must be settled by the file (specification 7.12).
    """
    parts: Parts = {"intermediate_size": fields.take("intermediate_size", positive)}
    if "num_experts" not in fields.values and MOE_FIELDS & fields.values.keys():
        fields.need("num_experts")  # experts are spoken of, but not how many
    experts = fields.take_or("num_experts", natural, 0)
    if not experts:
        zero = ("num_experts", "experts_per_token", "moe_intermediate_size", "num_shared_experts")
        off: Parts = dict.fromkeys(zero, 0) | {"first_dense_layers": 0, "moe_layer_freq": 1}
        off |= {"latent_size": None, "latent_norm": False, "renormalize": False}
        off |= {"routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1}
        return parts | off
    parts |= {
        "num_experts": experts,
        "moe_intermediate_size": fields.take("moe_intermediate_size", positive),
        "num_shared_experts": fields.take_or("num_shared_experts", natural, 0),
    }
    return parts | _latent(fields, is_k3) | _router(fields, experts) | _moe_layers(fields)


def _latent(fields: Fields, is_k3: bool) -> Parts:
    latent = fields.take("routed_expert_hidden_size", optional(positive)) if is_k3 else None
    if latent is not None:
        norm = fields.take("latent_moe_use_norm", boolean)
    elif fields.take_or("latent_moe_use_norm", boolean, False):
        fields.refuse("latent_moe_use_norm", "needs 'routed_expert_hidden_size'", "set it to false")
    else:
        norm = False
    return {"latent_size": latent, "latent_norm": norm}


def _router(fields: Fields, experts: int) -> Parts:
    fields.take("moe_router_activation_func", only("sigmoid"))
    fields.take_or("topk_method", only("noaux_tc"), "noaux_tc")
    fields.take_or("use_grouped_topk", only(True), True)
    groups = fields.take_or("num_expert_group", positive, 1)
    kept = fields.take_or("topk_group", positive, 1)
    per_token = fields.take("num_experts_per_token", positive)
    if experts % groups:
        fields.refuse("num_expert_group", f"must divide 'num_experts' = {experts}")
    if kept > groups:
        fields.refuse("topk_group", f"must not exceed 'num_expert_group' = {groups}")
    if kept < groups and experts // groups < 2:
        fields.refuse("num_expert_group", "leaves one expert a group; a group's score needs two")
    reachable = experts // groups * kept
    if per_token > reachable:
        fields.refuse("num_experts_per_token", f"exceeds the {reachable} experts to pick from")
    return {
        "experts_per_token": per_token,
        "num_expert_group": groups,
        "topk_group": kept,
        "renormalize": fields.take("moe_renormalize", boolean),
        "routed_scaling_factor": fields.take("routed_scaling_factor", above_zero),
    }


def _moe_layers(fields: Fields) -> Parts:
    first = fields.take("first_k_dense_replace", natural)
    freq = fields.take_or("moe_layer_freq", positive, 1)
    count = fields.take("num_hidden_layers", positive)
    if not any(layer % freq == 0 for layer in range(first, count)):
        reason = f"leaves none of the {count} layers to the experts"
        fields.refuse("first_k_dense_replace", reason, "lower it, or set 'num_experts' to 0")
    return {"first_dense_layers": first, "moe_layer_freq": freq}
