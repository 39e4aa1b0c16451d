"""The name map as data: which tensor a configuration needs, under which name, shape and dtype.

A rule's `shape` is a list of the dimension names of `dims.dimensions`; its `when` lists the
features of `dims.features` that must all be on. `expected.py` is the one interpreter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Storage = Literal["linear", "precise", "packed", "scale", "decay"]

# Accepted dtypes, the published one first (specification 2). All conversions to float32 are
# exact; F16 is not accepted, because no published checkpoint has it. "decay" is A_log, which is
# stored plain, padded with zeros, or with two unit axes.
DTYPES: dict[Storage, tuple[str, ...]] = {
    "linear": ("BF16", "F32"),
    "precise": ("F32", "BF16"),
    "decay": ("F32", "BF16"),
    "packed": ("U8",),
    "scale": ("U8", "F8_E8M0"),
}


class Rule(NamedTuple):
    """One row: name pattern, role, shape, storage class, and the features that ask for it."""

    pattern: str
    role: str
    shape: str
    storage: Storage = "linear"
    when: str = ""


MODEL: tuple[Rule, ...] = (
    Rule("model.embed_tokens.weight", "embedding", "vocab d"),
    Rule("model.norm.weight", "final_norm", "d"),
    Rule("model.output_attn_res_norm.weight", "attn_res.output_norm", "d", when="attn_res"),
    Rule("model.output_attn_res_proj.weight", "attn_res.output_proj", "1 d", when="attn_res"),
    Rule("lm_head.weight", "lm_head", "vocab d"),
)

# After "model.layers.{layer}.".
LAYER: tuple[Rule, ...] = (
    Rule("input_layernorm.weight", "norm.mixer", "d"),
    Rule("post_attention_layernorm.weight", "norm.ffn", "d"),
    Rule("self_attention_res_norm.weight", "attn_res.mixer_norm", "d", when="attn_res"),
    Rule("self_attention_res_proj.weight", "attn_res.mixer_proj", "1 d", when="attn_res"),
    Rule("mlp_res_norm.weight", "attn_res.ffn_norm", "d", when="attn_res"),
    Rule("mlp_res_proj.weight", "attn_res.ffn_proj", "1 d", when="attn_res"),
    # KDA
    Rule("self_attn.q_proj.weight", "kda.q", "kda d", when="kda"),
    Rule("self_attn.k_proj.weight", "kda.k", "kda d", when="kda"),
    Rule("self_attn.v_proj.weight", "kda.v", "kda d", when="kda"),
    Rule("self_attn.q_conv1d.weight", "kda.q_conv", "kda 1 conv", "precise", "kda"),
    Rule("self_attn.k_conv1d.weight", "kda.k_conv", "kda 1 conv", "precise", "kda"),
    Rule("self_attn.v_conv1d.weight", "kda.v_conv", "kda 1 conv", "precise", "kda"),
    Rule("self_attn.f_a_proj.weight", "kda.decay_a", "kda_head d", when="kda"),
    Rule("self_attn.f_b_proj.weight", "kda.decay_b", "kda kda_head", when="kda"),
    Rule("self_attn.b_proj.weight", "kda.beta", "kda_heads d", when="kda"),
    Rule("self_attn.A_log", "kda.a_log", "kda_heads", "decay", "kda"),
    Rule("self_attn.dt_bias", "kda.dt_bias", "kda", "precise", "kda"),
    Rule("self_attn.g_proj.weight", "kda.gate", "kda d", when="kda full_rank_gate"),
    Rule("self_attn.g_a_proj.weight", "kda.gate_a", "kda_head d", when="kda low_rank_gate"),
    Rule("self_attn.g_b_proj.weight", "kda.gate_b", "kda kda_head", when="kda low_rank_gate"),
    Rule("self_attn.o_norm.weight", "kda.o_norm", "kda_head", "precise", "kda"),
    Rule("self_attn.o_proj.weight", "kda.o", "d kda", when="kda"),
    # MLA
    Rule("self_attn.q_proj.weight", "mla.q", "mla_q d", when="mla q_full"),
    Rule("self_attn.q_a_proj.weight", "mla.q_a", "q_lora d", when="mla q_lora"),
    Rule("self_attn.q_a_layernorm.weight", "mla.q_norm", "q_lora", when="mla q_lora"),
    Rule("self_attn.q_b_proj.weight", "mla.q_b", "mla_q q_lora", when="mla q_lora"),
    Rule("self_attn.kv_a_proj_with_mqa.weight", "mla.kv_a", "kv_lora+rope d", when="mla"),
    Rule("self_attn.kv_a_layernorm.weight", "mla.kv_norm", "kv_lora", when="mla"),
    Rule("self_attn.kv_b_proj.weight", "mla.kv_b", "mla_kv kv_lora", when="mla"),
    Rule("self_attn.g_proj.weight", "mla.gate", "mla_v d", when="mla mla_gate"),
    Rule("self_attn.o_proj.weight", "mla.o", "d mla_v", when="mla"),
    # Feed-forward
    Rule("mlp.gate_proj.weight", "dense.gate", "ffn d", when="dense"),
    Rule("mlp.up_proj.weight", "dense.up", "ffn d", when="dense"),
    Rule("mlp.down_proj.weight", "dense.down", "d ffn", when="dense"),
    Rule("block_sparse_moe.gate.weight", "router.weight", "experts d", when="moe"),
    Rule(
        "block_sparse_moe.gate.e_score_correction_bias", "router.bias", "experts", "precise", "moe"
    ),
    Rule(
        "block_sparse_moe.routed_expert_down_proj.weight", "latent.down", "width d", when="latent"
    ),
    Rule("block_sparse_moe.routed_expert_norm.weight", "latent.norm", "width", when="latent_norm"),
    Rule("block_sparse_moe.routed_expert_up_proj.weight", "latent.up", "d width", when="latent"),
    Rule(
        "block_sparse_moe.shared_experts.gate_proj.weight", "shared.gate", "shared d", when="shared"
    ),
    Rule("block_sparse_moe.shared_experts.up_proj.weight", "shared.up", "shared d", when="shared"),
    Rule(
        "block_sparse_moe.shared_experts.down_proj.weight", "shared.down", "d shared", when="shared"
    ),
)

# After "model.layers.{layer}.block_sparse_moe.experts.{expert}.".
EXPERT: tuple[Rule, ...] = (
    Rule("w1.weight", "expert.gate", "moe width", when="plain"),
    Rule("w3.weight", "expert.up", "moe width", when="plain"),
    Rule("w2.weight", "expert.down", "width moe", when="plain"),
    Rule("w1.weight_packed", "expert.gate.packed", "moe width/2", "packed", "mxfp4"),
    Rule("w1.weight_scale", "expert.gate.scale", "moe width/32", "scale", "mxfp4"),
    Rule("w3.weight_packed", "expert.up.packed", "moe width/2", "packed", "mxfp4"),
    Rule("w3.weight_scale", "expert.up.scale", "moe width/32", "scale", "mxfp4"),
    Rule("w2.weight_packed", "expert.down.packed", "width moe/2", "packed", "mxfp4"),
    Rule("w2.weight_scale", "expert.down.scale", "width moe/32", "scale", "mxfp4"),
)

# Tensors that the text model does not use. Prediction layers are skipped as well, but only as
# many as the configuration announces: a longer list of layers means a wrong configuration.
SKIPPED_PREFIXES: tuple[str, ...] = ("vision_tower.", "mm_projector.")
