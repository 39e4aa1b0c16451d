"""Every configuration field changes the reference's logits or is refused (F17, F23, F24)."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from k3tvm.errors import CheckpointError
from k3tvm.reference import Reference
from k3tvm.relax_models.config import ModelConfig
from tests.reference_checks import (
    nmse,
    random_ids,
    reference,
)
from tests.reference_models import CONFIGS, K3, LINEAR, random_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


# A changed value per field: the logits change, or the weights do not fit and it is said so.
CHANGES = {
    "vocab_size": 66,
    "hidden_size": 48,
    "num_layers": 7,
    "rms_norm_eps": 1e-2,
    "layer_kinds": ("kda", "kda", "mla", "kda", "kda", "kda", "mla", "mla"),
    "kda_heads": 2,
    "kda_head_dim": 15,
    "conv_kernel": 3,
    "gate_lower_bound": -4.0,
    "kda_full_rank_gate": False,
    "num_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 39,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 5,
    "v_head_dim": 9,
    "mla_output_gate": False,
    "attn_res_block_size": 4,
    "hidden_act": "silu",
    "situ_beta": 3.0,
    "situ_linear_beta": None,
    "intermediate_size": 51,
    "num_experts": 11,
    "experts_per_token": 2,
    "moe_intermediate_size": 31,
    "num_shared_experts": 1,
    "latent_size": None,
    "latent_norm": False,
    "first_dense_layers": 2,
    "moe_layer_freq": 2,
    "renormalize": False,
    "routed_scaling_factor": 2.0,
    "num_expert_group": 6,
    "topk_group": 1,
    "tensor_prefix": "",
}
# Not read by the computation: limits and token ids of the caller, and how tensors are stored,
# which the tensors themselves say.
NOT_COMPUTED = {
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "num_mtp_layers",
    "weight_dtype",
    "mxfp4_experts",
}


def test_f17_every_field_is_listed_here():
    assert {f.name for f in fields(ModelConfig)} == set(CHANGES) | NOT_COMPUTED


@pytest.mark.parametrize("field", CHANGES)
def test_f17_a_changed_field_changes_the_logits_or_is_refused(field):
    base = replace(K3, num_expert_group=4, topk_group=2)
    if field in ("renormalize", "routed_scaling_factor"):
        base = CONFIGS["k3-no-latent"]  # the latent norm cancels a common scale of the weights
    tensors, ids = random_tensors(base), random_ids(base, 30)
    want, _ = Reference(base, tensors).forward(ids)
    try:
        got, _ = Reference(replace(base, **{field: CHANGES[field]}), tensors).forward(ids)
    except CheckpointError:
        return
    assert nmse(got, want) > 1e-4


@pytest.mark.parametrize("name", ["k3-dense", "k3-pruned", "k3-one-expert"])
def test_f23_dense_and_pruned_models_need_no_tensor_they_do_not_have(name):
    model = reference(CONFIGS[name])
    logits, _ = model.forward(random_ids(CONFIGS[name], 40))
    assert logits.isfinite().all() and logits.std() > 0.1


@pytest.mark.parametrize(
    "feature",
    [
        {"gate_lower_bound": -5.0},
        {"kda_full_rank_gate": True},
        {"q_lora_rank": 28},
        {"mla_output_gate": True},
        {"attn_res_block_size": 3},
        {"latent_size": 96, "latent_norm": True},
        {"hidden_act": "situ", "situ_beta": 4.0},
    ],
    ids=lambda feature: next(iter(feature)),
)
def test_f24_each_feature_works_by_itself_on_the_other_family(feature):
    config = replace(LINEAR, **feature)
    plain, own, ids = random_tensors(LINEAR), random_tensors(config), random_ids(LINEAR, 20)
    same = {n: t for n, t in plain.items() if n in own and own[n].shape == t.shape}
    got, _ = Reference(config, own | same).forward(ids)
    want, _ = Reference(LINEAR, plain).forward(ids)
    assert nmse(got, want) > 1e-3
