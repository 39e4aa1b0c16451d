"""Turns a ModelConfig into the dimension and feature names that the name map speaks of."""

from __future__ import annotations

from k3tvm.relax_models.config import ModelConfig


def dimensions(config: ModelConfig) -> dict[str, int]:
    """Sizes by the names used in rule shapes (specification 2)."""
    c = config
    width, moe = c.expert_width, c.moe_intermediate_size
    return {
        "1": 1,
        "vocab": c.vocab_size,
        "d": c.hidden_size,
        "kda": c.kda_width,
        "kda_heads": c.kda_heads,
        "kda_head": c.kda_head_dim,
        "conv": c.conv_kernel,
        "q_lora": c.q_lora_rank or 0,
        "kv_lora": c.kv_lora_rank,
        "kv_lora+rope": c.kv_lora_rank + c.qk_rope_head_dim,
        "mla_q": c.num_heads * c.qk_head_dim,
        "mla_kv": c.num_heads * (c.qk_nope_head_dim + c.v_head_dim),
        "mla_v": c.num_heads * c.v_head_dim,
        "ffn": c.intermediate_size,
        "experts": c.num_experts,
        "shared": c.shared_size,
        "moe": moe,
        "moe/2": moe // 2,
        "moe/32": moe // 32,
        "width": width,
        "width/2": width // 2,
        "width/32": width // 32,
    }


def features(config: ModelConfig, layer: int | None = None) -> frozenset[str]:
    """Features that are on for the model as a whole (`layer` None) or for one layer, from 0."""
    on = {"attn_res"} if config.attn_res_block_size is not None else set()
    if layer is None:
        return frozenset(on)
    on |= {config.layer_kinds[layer], config.ffn_kind(layer)}
    on |= {"full_rank_gate" if config.kda_full_rank_gate else "low_rank_gate"}
    on |= {"q_full" if config.q_lora_rank is None else "q_lora"}
    on |= {"mla_gate"} if config.mla_output_gate else set()
    if config.ffn_kind(layer) == "moe":
        on |= {"mxfp4" if config.mxfp4_experts else "plain"}
        on |= {"shared"} if config.shared_size else set()
        on |= {"latent"} if config.latent_size is not None else set()
        on |= {"latent_norm"} if config.latent_norm else set()
    return frozenset(on)
