"""The table of example models: each name stands for a `config.json` in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """One example model. `drawn` experts are random codes rather than encoded random values."""

    purpose: str
    config: Json
    drawn: bool = False


# Every width of the small models differs from every other, so that a swapped or transposed
# dimension cannot hide; five layers or more, with two MLA layers in a row at the end, as in K3.
TINY: Json = {
    "vocab_size": 499,
    "hidden_size": 112,
    "num_hidden_layers": 7,
    "intermediate_size": 152,
    "num_attention_heads": 5,
    "q_lora_rank": 40,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
    "num_experts": 10,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 96,
    "num_shared_experts": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_K3: Json = TINY | {"attn_res_block_size": 3, "routed_expert_hidden_size": 64}
TINY_LINEAR: Json = TINY | {"q_lora_rank": None, "num_shared_experts": 1}
TINY_KDA: Json = {"num_heads": 3, "head_dim": 16}
TINY_MLA_LAYERS = (3, 6, 7)
MXFP4_GROUP: Json = {
    "format": "mxfp4-pack-quantized",
    "input_activations": None,
    "output_activations": None,
    "targets": ["Linear"],
    "weights": {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    },
}
MXFP4: Json = {
    "config_groups": {"group_0": MXFP4_GROUP},
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
COMMON: Json = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
K3_FEATURES: Json = {
    "mla_use_output_gate": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "latent_moe_use_norm": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
}


def _layers(count: int, mla: tuple[int, ...]) -> Json:
    """The two layer lists, counted from 1 as published."""
    kda = [layer for layer in range(1, count + 1) if layer not in mla]
    return {"full_attn_layers": list(mla), "kda_layers": kda}


def k3(
    sizes: Mapping[str, Any],
    kda: Mapping[str, Any],
    mla: tuple[int, ...],
    quantized: bool = True,
    softplus: bool = False,
) -> Json:
    """A nested K3 `config.json`; `softplus` leaves out the gate's lower bound as the twin does."""
    linear: Json = {"short_conv_kernel_size": 4, "use_full_rank_gate": True}
    linear |= {} if softplus else {"gate_lower_bound": -5.0}
    linear |= dict(kda) | _layers(sizes["num_hidden_layers"], mla)
    text = COMMON | K3_FEATURES | dict(sizes) | {"linear_attn_config": linear}
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    if quantized:
        text["quantization_config"] = MXFP4
    outer = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": text["dtype"],
        "tie_word_embeddings": False,
    }
    ids = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return outer | ids | {"text_config": text}


def kimi_linear(sizes: Mapping[str, Any], kda: Mapping[str, Any], mla: tuple[int, ...]) -> Json:
    """A flat Kimi-Linear `config.json`."""
    linear = {"short_conv_kernel_size": 4} | dict(kda) | _layers(sizes["num_hidden_layers"], mla)
    features: Json = {"hidden_act": "silu", "routed_scaling_factor": 2.446, "rope_scaling": None}
    features |= {"rope_theta": 10000.0, "linear_attn_config": linear}
    text = COMMON | features | dict(sizes)
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    text["model_max_length"] = text.pop("max_position_embeddings")
    return text


def tiny(changes: Mapping[str, Any], kda: Mapping[str, Any] | None = None, **kinds: Any) -> Json:
    """A small K3 with some sizes changed."""
    return k3(TINY_K3 | dict(changes), TINY_KDA | dict(kda or {}), TINY_MLA_LAYERS, **kinds)


def without_situ(config: Json) -> Json:
    """The same model with SiLU in place of SiTU."""
    betas = ("activation_situ_beta", "activation_situ_linear_beta")
    text = {name: value for name, value in config["text_config"].items() if name not in betas}
    return config | {"text_config": text | {"hidden_act": "silu"}}


def without_experts(config: Json) -> Json:
    """The same model with dense layers only."""
    text = {n: v for n, v in config["text_config"].items() if n != "quantization_config"}
    return config | {"text_config": text | {"num_experts": 0}}


TWIN: Json = {
    "vocab_size": 163840,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 256,
    "routed_expert_hidden_size": 512,
    "attn_res_block_size": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BENCH: Json = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 64,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 512,
    "routed_expert_hidden_size": 512,
    "attn_res_block_size": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BENCH_MOE: Json = BENCH | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "kv_lora_rank": 256,
    "num_experts_per_token": 16,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "routed_expert_hidden_size": 768,
}

PRESETS: dict[str, Preset] = {
    "k3-tiny": Preset("all features of K3, all widths distinct", tiny({})),
    "k3-tiny-h1": Preset(
        "one head everywhere, blocks of 2",
        tiny({"num_attention_heads": 1, "attn_res_block_size": 2}, {"num_heads": 1}),
    ),
    "k3-tiny-h6": Preset(
        "six heads, blocks of 4",
        tiny({"num_attention_heads": 6, "attn_res_block_size": 4}, {"num_heads": 6}),
    ),
    "k3-tiny-groups": Preset(
        "12 experts in 4 groups of which 2 are kept, no output gate in MLA",
        tiny(
            {
                "num_experts": 12,
                "num_expert_group": 4,
                "topk_group": 2,
                "mla_use_output_gate": False,
            }
        ),
    ),
    "k3-tiny-lowrank": Preset(
        "low-rank output gate, full query projection, one block for all layers",
        tiny({"q_lora_rank": None, "attn_res_block_size": 12}, {"use_full_rank_gate": False}),
    ),
    "k3-tiny-nolatent": Preset(
        "MXFP4 experts that work on the hidden width, no shared experts",
        tiny(
            {
                "hidden_size": 128,
                "routed_expert_hidden_size": None,
                "latent_moe_use_norm": False,
                "num_shared_experts": 0,
            }
        ),
    ),
    "k3-silu-tiny": Preset("SiLU in place of SiTU", without_situ(tiny({}))),
    "k3-twin-tiny": Preset(
        "softplus gate, everything stored in F32",
        tiny({"dtype": "float32"}, quantized=False, softplus=True),
    ),
    "k3-dense-tiny": Preset("no experts at all", without_experts(tiny({}))),
    "k3-pruned-tiny": Preset("7 experts left", tiny({"num_experts": 7})),
    "kimi-linear-tiny": Preset(
        "Kimi-Linear: plain residual, BF16 experts, softplus gate",
        kimi_linear(TINY_LINEAR, TINY_KDA, TINY_MLA_LAYERS),
    ),
    "k3-twin": Preset(
        "the dimensions of the 0.40B twin, MXFP4 experts",
        k3(TWIN, {"num_heads": 8, "head_dim": 32}, (4, 8), softplus=True),
    ),
    "k3-bench": Preset(
        "471 M parameters, for speed of the dense part",
        k3(BENCH, {"num_heads": 8, "head_dim": 128}, (4, 8)),
        drawn=True,
    ),
    "k3-bench-moe": Preset(
        "routed experts are most of a token's bytes",
        k3(BENCH_MOE, {"num_heads": 4, "head_dim": 128}, (4, 8)),
        drawn=True,
    ),
}
