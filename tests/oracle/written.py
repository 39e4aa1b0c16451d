"""Turns a configuration and random tensors into a checkpoint folder as the publisher writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from k3tvm.relax_models.config import ModelConfig

FP32_TENSORS = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
                "observer": "minmax",
            },
        }
    },
    "ignore": [".*self_attn.*", ".*shared_experts.*", ".*lm_head.*"],
}
SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "hidden_act",
    "intermediate_size",
    "num_experts",
    "moe_intermediate_size",
    "num_shared_experts",
    "moe_layer_freq",
    "routed_scaling_factor",
    "num_expert_group",
    "topk_group",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def attention_json(c: ModelConfig) -> dict[str, Any]:
    """`linear_attn_config`; layers are counted from 1 (specification 1.1)."""
    places = {
        kind: [i + 1 for i, k in enumerate(c.layer_kinds) if k == kind] for kind in ("kda", "mla")
    }
    values: dict[str, Any] = {
        "num_heads": c.kda_heads,
        "head_dim": c.kda_head_dim,
        "short_conv_kernel_size": c.conv_kernel,
        "kda_layers": places["kda"],
        "full_attn_layers": places["mla"],
    }
    if c.kda_full_rank_gate:
        values["use_full_rank_gate"] = True
    if c.gate_lower_bound is not None:
        values["gate_lower_bound"] = c.gate_lower_bound
    return values


def text_json(c: ModelConfig) -> dict[str, Any]:
    """The text model's part of config.json; a feature that is off is not named."""
    values = {name: getattr(c, name) for name in SAME_NAME} | {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "num_experts_per_token": c.experts_per_token,
        "first_k_dense_replace": c.first_dense_layers,
        "moe_renormalize": c.renormalize,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "tie_word_embeddings": False,
        "linear_attn_config": attention_json(c),
    }
    if c.attn_res_block_size is not None:
        values["attn_res_block_size"] = c.attn_res_block_size
    if c.mla_output_gate:
        values["mla_use_output_gate"] = True
    if c.hidden_act == "situ":
        values["activation_situ_beta"] = c.situ_beta
        values["activation_situ_linear_beta"] = c.situ_linear_beta
    if c.num_experts and (c.latent_size is not None or c.tensor_prefix):
        values["routed_expert_hidden_size"] = c.latent_size
        values["latent_moe_use_norm"] = c.latent_norm
    if c.mxfp4_experts:
        values["quantization_config"] = QUANTIZATION
    return values


def stored(name: str, tensor: Tensor, c: ModelConfig) -> Tensor:
    """The tensor in its published type; `A_log` padded (K3) or four-dimensional (Kimi-Linear)."""
    if tensor.dtype == torch.uint8:
        return tensor
    if name.endswith("A_log") and c.tensor_prefix:
        tensor = torch.cat((tensor, torch.zeros(c.kda_head_dim - len(tensor)).double()))
    elif name.endswith("A_log"):
        tensor = tensor.reshape(1, 1, -1, 1)
    return tensor.to(torch.float32 if name.endswith(FP32_TENSORS) else torch.bfloat16)


def write(folder: Path, c: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Writes the checkpoint and returns the tensors exactly as they were stored."""
    values = text_json(c)
    if c.tensor_prefix:
        values = {
            "model_type": "kimi_k3",
            "architectures": ["KimiK3ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": values,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    kept = {name: stored(name, tensor, c).contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return kept
