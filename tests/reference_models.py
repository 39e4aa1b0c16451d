"""Turns a table of small configurations into random tensors in the published names and layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from k3tvm.relax_models.config import ModelConfig

# Every dimension differs from every other, so that a transposed or swapped width cannot hide.
K3 = ModelConfig(
    vocab_size=67,
    hidden_size=44,
    num_layers=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    layer_kinds=("kda", "kda", "kda", "mla", "kda", "kda", "mla", "mla"),
    kda_heads=3,
    kda_head_dim=16,
    conv_kernel=4,
    gate_lower_bound=-5.0,
    kda_full_rank_gate=True,
    num_heads=5,
    q_lora_rank=28,
    kv_lora_rank=40,
    qk_nope_head_dim=12,
    qk_rope_head_dim=6,
    v_head_dim=10,
    mla_output_gate=True,
    attn_res_block_size=3,
    hidden_act="situ",
    situ_beta=4.0,
    situ_linear_beta=25.0,
    intermediate_size=52,
    num_experts=12,
    experts_per_token=3,
    moe_intermediate_size=32,
    num_shared_experts=2,
    latent_size=96,
    latent_norm=True,
    first_dense_layers=1,
    moe_layer_freq=1,
    renormalize=True,
    routed_scaling_factor=1.0,
    num_expert_group=1,
    topk_group=1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tensor_prefix="language_model.",
    mxfp4_experts=True,
)
LINEAR = replace(
    K3,
    gate_lower_bound=None,
    kda_full_rank_gate=False,
    q_lora_rank=None,
    mla_output_gate=False,
    attn_res_block_size=None,
    hidden_act="silu",
    situ_beta=0.0,
    situ_linear_beta=None,
    num_shared_experts=1,
    latent_size=None,
    latent_norm=False,
    routed_scaling_factor=2.446,
    tensor_prefix="",
    mxfp4_experts=False,
)
DENSE = replace(
    K3,
    num_experts=0,
    experts_per_token=0,
    moe_intermediate_size=0,
    num_shared_experts=0,
    latent_size=None,
    latent_norm=False,
    first_dense_layers=0,
    renormalize=False,
    mxfp4_experts=False,
)
CONFIGS = {
    "k3": K3,
    "k3-groups": replace(K3, num_expert_group=4, topk_group=2, attn_res_block_size=4),
    "k3-softplus": replace(K3, gate_lower_bound=None, kda_heads=1),
    "k3-pruned": replace(K3, num_experts=7, kda_heads=6, attn_res_block_size=12),
    "k3-one-expert": replace(K3, num_experts=1, experts_per_token=1, moe_layer_freq=2),
    "k3-no-latent": replace(K3, latent_size=None, latent_norm=False, mxfp4_experts=False),
    "k3-dense": DENSE,
    "linear": LINEAR,
    "linear-q-lora-groups": replace(LINEAR, q_lora_rank=28, num_expert_group=2, topk_group=1),
}
Shapes = dict[str, tuple[int, ...]]


def matrices(**shapes: tuple[int, int]) -> Shapes:
    """Linear maps by name, [out, in]."""
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def kda_shapes(c: ModelConfig) -> Shapes:
    """Tensors of one KDA mixer (specification 2)."""
    d, width, dim = c.hidden_size, c.kda_width, c.kda_head_dim
    gates = {"g_proj": (width, d)} if c.kda_full_rank_gate else {}
    if not gates:
        gates = {"g_a_proj": (dim, d), "g_b_proj": (width, dim)}
    low = {"f_a_proj": (dim, d), "f_b_proj": (width, dim), "b_proj": (c.kda_heads, d)}
    convs: Shapes = {f"{side}_conv1d.weight": (width, 1, c.conv_kernel) for side in "qkv"}
    flat: Shapes = {"A_log": (c.kda_heads,), "dt_bias": (width,), "o_norm.weight": (dim,)}
    sides = {f"{side}_proj": (width, d) for side in "qkv"}
    return convs | flat | matrices(**sides, **low, **gates, o_proj=(d, width))


def mla_shapes(c: ModelConfig) -> Shapes:
    """Tensors of one MLA mixer."""
    d, rank, v_width = c.hidden_size, c.kv_lora_rank, c.num_heads * c.v_head_dim
    shapes = matrices(
        kv_a_proj_with_mqa=(rank + c.qk_rope_head_dim, d),
        kv_b_proj=(c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), rank),
        o_proj=(d, v_width),
    )
    shapes["kv_a_layernorm.weight"] = (rank,)
    query = c.num_heads * c.qk_head_dim
    if c.q_lora_rank is None:
        shapes |= matrices(q_proj=(query, d))
    else:
        shapes |= matrices(q_a_proj=(c.q_lora_rank, d), q_b_proj=(query, c.q_lora_rank))
        shapes["q_a_layernorm.weight"] = (c.q_lora_rank,)
    return shapes | (matrices(g_proj=(v_width, d)) if c.mla_output_gate else {})


def glu_shapes(width: int, inner: int) -> Shapes:
    """Tensors of one gated MLP."""
    return matrices(gate_proj=(inner, width), up_proj=(inner, width), down_proj=(width, inner))


def moe_shapes(c: ModelConfig) -> Shapes:
    """Tensors of one expert layer; experts as plain matrices."""
    d, width, inner = c.hidden_size, c.expert_width, c.moe_intermediate_size
    shapes = matrices(gate=(c.num_experts, d))
    shapes["gate.e_score_correction_bias"] = (c.num_experts,)
    for e in range(c.num_experts):
        one = matrices(w1=(inner, width), w3=(inner, width), w2=(width, inner))
        shapes |= {f"experts.{e}.{name}": shape for name, shape in one.items()}
    if c.latent_size is not None:
        shapes |= matrices(routed_expert_down_proj=(width, d), routed_expert_up_proj=(d, width))
    if c.latent_norm:
        shapes["routed_expert_norm.weight"] = (width,)
    shared = glu_shapes(d, c.shared_size) if c.num_shared_experts else {}
    return shapes | {f"shared_experts.{name}": shape for name, shape in shared.items()}


def layer_shapes(c: ModelConfig, i: int) -> Shapes:
    """Tensors of one layer by their name below `model.layers.i`."""
    d = c.hidden_size
    mixer = kda_shapes(c) if c.layer_kinds[i] == "kda" else mla_shapes(c)
    ffn = moe_shapes(c) if c.ffn_kind(i) == "moe" else glu_shapes(d, c.intermediate_size)
    home = "block_sparse_moe" if c.ffn_kind(i) == "moe" else "mlp"
    shapes: Shapes = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    if c.attn_res_block_size is not None:
        for name in ("self_attention_res", "mlp_res"):
            shapes |= {f"{name}_norm.weight": (d,), f"{name}_proj.weight": (1, d)}
    shapes |= {f"self_attn.{name}": shape for name, shape in mixer.items()}
    return shapes | {f"{home}.{name}": shape for name, shape in ffn.items()}


def model_shapes(c: ModelConfig) -> Shapes:
    """All tensors of a model by published name, experts as plain matrices (specification 2)."""
    d = c.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab_size, d), "model.norm.weight": (d,)}
    shapes["lm_head.weight"] = (c.vocab_size, d)
    if c.attn_res_block_size is not None:
        shapes |= {"model.output_attn_res_norm.weight": (d,)}
        shapes |= {"model.output_attn_res_proj.weight": (1, d)}
    for i in range(c.num_layers):
        shapes |= {f"model.layers.{i}.{n}": s for n, s in layer_shapes(c, i).items()}
    return {c.tensor_prefix + name: shape for name, shape in shapes.items()}


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One random tensor with the spread of its kind; decays cover the released range."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 1.5 - 0.5
    if name.endswith("dt_bias"):
        return normal * 2 - 1
    if name.endswith("e_score_correction_bias"):
        return normal * 0.2
    if name.endswith(("norm.weight", "layernorm.weight")):
        return 1 + 0.2 * normal
    if name.endswith("embed_tokens.weight"):
        return normal
    return normal * shape[-1] ** -0.5


@cache
def _drawn(c: ModelConfig, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in model_shapes(c).items():
        if c.mxfp4_experts and ".experts." in name:
            rows, width = shape
            scale = torch.randint(122, 125, (rows, width // 32), generator=generator)
            packed = torch.randint(0, 256, (rows, width // 2), generator=generator)
            tensors[f"{name}_packed"] = packed.to(torch.uint8)
            tensors[f"{name}_scale"] = scale.to(torch.uint8)
        else:
            tensors[name] = draw(name, shape, generator)
    return tensors


def random_tensors(c: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a model: float64, MXFP4 pairs for experts if the model has them so.

    The dict is the caller's own; the tensors are shared and must not be changed in place.
    """
    return dict(_drawn(c, seed))
