"""Lists the fields of `config.json` that change nothing, and those that allow one value only."""

from __future__ import annotations

from typing import Any

# Descriptions, training settings and generation defaults that library classes write into every
# configuration. None of them enters the mathematics (specification 1.1): the only such list.
_INERT = """
    _name_or_path architectures auto_map finetuning_task id2label label2id model_type prefix
    problem_type task_specific_params tokenizer_class transformers_version
    initializer_range return_dict torchscript use_bfloat16 use_cache
    output_attentions output_hidden_states output_scores return_dict_in_generate
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty sep_token_id suppress_tokens temperature tf_legacy_loss top_k top_p typical_p
    head_dim rope_theta chunk_size_feed_forward
"""
INERT: frozenset[str] = frozenset(_INERT.split())

# Beside `text_config` stand the image side, which is skipped, and its placeholders.
INERT_OUTER: frozenset[str] = INERT | frozenset(
    ["vision_config", "ignore_index", "image_placeholder", "media_placeholder_token_id"]
)

# Fields whose other values would ask for mathematics that is not implemented. An absent field
# means the first value. `head_dim` and `rope_theta` above are inert only because nothing rotates.
FIXED: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (None,),
    "tie_word_embeddings": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "pretraining_tp": (1,),
    "sliding_window": (None,),
}

# Read only when the model has experts; a dense model (`num_experts` 0) may carry or omit them.
_MOE_FIELDS = """
    num_experts_per_token moe_intermediate_size num_shared_experts routed_expert_hidden_size
    latent_moe_use_norm first_k_dense_replace moe_layer_freq moe_renormalize
    moe_router_activation_func use_grouped_topk topk_method num_expert_group topk_group
    routed_scaling_factor
"""
MOE_FIELDS: frozenset[str] = frozenset(_MOE_FIELDS.split())
