"""Turns the published nested or flat JSON layout into the keyword arguments of ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3tvm.errors import ConfigError
from k3tvm.relax_models.config_experts import feed_forward
from k3tvm.relax_models.config_layers import layers
from k3tvm.relax_models.config_reader import (
    Fields,
    above_zero,
    boolean,
    finite,
    natural,
    only,
    optional,
    positive,
)
from k3tvm.relax_models.config_storage import storage
from k3tvm.relax_models.config_tables import FIXED, INERT, INERT_OUTER, MOE_FIELDS

Parts = dict[str, Any]
MOST_LAYERS = 10_000
# The two features that make a K3. A file that speaks of either must settle both: a forgotten
# one would load cleanly as the other architecture and give garbage (specification 7.12).
K3_FIELDS = ("attn_res_block_size", "routed_expert_hidden_size")


def parse(values: Mapping[str, Any], where: str) -> Parts:
    """Keyword arguments of ModelConfig from a parsed `config.json`; ConfigError names the field."""
    nested = "text_config" in values
    outer = Fields(values, where)
    inner = outer.take_object("text_config") if nested else outer
    if inner is None:
        raise ConfigError("field 'text_config' is null", where=where, cure="give the text model")
    is_k3 = nested or any(name in inner.values for name in K3_FIELDS)
    parts = _sizes(inner) | _mla(inner) | _activation(inner) | feed_forward(inner, is_k3)
    parts |= layers(inner, parts["num_layers"]) | _tokens(inner, outer)
    block = inner.take("attn_res_block_size", optional(positive)) if is_k3 else None
    parts |= {"attn_res_block_size": block, "tensor_prefix": "language_model." if nested else ""}
    parts |= storage(inner, outer, parts)
    for fields, inert in ((outer, INERT_OUTER), (inner, INERT)):
        _fixed(fields)
        fields.finish(inert if parts["num_experts"] or fields is not inner else inert | MOE_FIELDS)
    return parts


def _sizes(fields: Fields) -> Parts:
    length = fields.take_or("model_max_length", positive, 0)
    limit = fields.take_or("max_position_embeddings", positive, length)
    if not limit:
        fields.need("max_position_embeddings")
        fields.refuse("max_position_embeddings", "must be a whole number from 1")
    if length not in (0, limit):
        fields.refuse("model_max_length", "contradicts 'max_position_embeddings'", "keep one")
    return {
        "vocab_size": fields.take("vocab_size", positive),
        "hidden_size": fields.take("hidden_size", positive),
        "num_layers": fields.take("num_hidden_layers", _layer_count),
        "rms_norm_eps": fields.take("rms_norm_eps", above_zero),
        "max_position_embeddings": limit,
    }


def _layer_count(value: object) -> int:
    """Bounded, so that a typing error is refused before lists of that length are made."""
    if positive(value) > MOST_LAYERS:
        raise ValueError(f"is not plausible, at most {MOST_LAYERS} are accepted")
    return positive(value)


def _mla(fields: Fields) -> Parts:
    heads = fields.take("num_attention_heads", positive)
    if fields.take_or("num_key_value_heads", positive, heads) != heads:
        fields.refuse("num_key_value_heads", f"must equal 'num_attention_heads' = {heads}")
    fields.take("mla_use_nope", only(True))
    return {
        "num_heads": heads,
        "q_lora_rank": fields.take("q_lora_rank", optional(positive)),
        "kv_lora_rank": fields.take("kv_lora_rank", positive),
        "qk_nope_head_dim": fields.take("qk_nope_head_dim", positive),
        "qk_rope_head_dim": fields.take("qk_rope_head_dim", positive),
        "v_head_dim": fields.take("v_head_dim", positive),
        "mla_output_gate": fields.take_or("mla_use_output_gate", boolean, False),
    }


def _activation(fields: Fields) -> Parts:
    names = ("activation_situ_beta", "activation_situ_linear_beta")
    if fields.take("hidden_act", only("situ", "silu")) == "situ":
        beta = fields.take(names[0], above_zero)
        linear = fields.take(names[1], optional(above_zero))
        return {"hidden_act": "situ", "situ_beta": beta, "situ_linear_beta": linear}
    for name in names:
        if fields.take_or(name, optional(finite), None) is not None:
            fields.refuse(name, "has no effect with hidden_act 'silu'", "remove one of the two")
    return {"hidden_act": "silu", "situ_beta": 0.0, "situ_linear_beta": None}


def _tokens(inner: Fields, outer: Fields) -> Parts:
    """Special ids; the text model's own stand before those of the outer object."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    fallback = {name: outer.take_or(name, optional(natural), None) for name in names}
    return {name: inner.take_or(name, optional(natural), fallback[name]) for name in names}


def _fixed(fields: Fields) -> None:
    for name, allowed in FIXED.items():
        fields.take_or(name, only(*allowed), allowed[0])
    rope = fields.take_object("rope_parameters")
    if rope is not None:
        rope.take("rope_type", only("default"))
        rope.finish(("rope_theta",))
