"""KDA and MLA layers of the torch reference against other forms written from raw tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k3tvm.reference import blocks, ops
from k3tvm.reference.weights import (
    Weights,
    as_torch,
    exact,
)
from k3tvm.relax_models.config import ModelConfig
from tests.reference_checks import (
    f64,
    relative,
    scalar_delta_rule,
)
from tests.reference_models import K3, random_tensors
from tests.tolerances import tolerance

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = tolerance("reference_float64")


@pytest.mark.parametrize("full_rank", [True, False])
def test_kda_layer_applies_every_gate_and_scale_once(full_rank):
    """The whole layer from raw tensors: silu, q scale, beta in (0, 1), sigmoid output gate."""
    c = replace(K3, kda_full_rank_gate=full_rank)
    w = Weights(random_tensors(c), torch.float64, exact, "language_model.model.layers.1.self_attn.")
    x = torch.randn(6, 44, generator=torch.Generator().manual_seed(1)).double()
    start = blocks.empty_state(c, 1, torch.float64)
    assert isinstance(start, blocks.KdaState)
    got, _ = blocks.kda(c, w, x, start, "step")

    def lin(u: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(u, as_torch(w.raw(f"{name}.weight")))

    def heads(u: Tensor) -> Tensor:
        return u.reshape(6, 3, 16)

    def side(name: str) -> Tensor:
        u = torch.cat((torch.zeros(3, 48).double(), lin(x, f"{name}_proj")))
        u = torch.einsum("tcw,cw->tc", u.unfold(0, 4, 1), w.raw(f"{name}_conv1d.weight")[:, 0])
        return heads(u * torch.sigmoid(u))

    q, k, v = side("q"), side("k"), side("v")
    q = q / torch.sqrt((q * q).sum(2, True) + 1e-6) / 4
    k = k / torch.sqrt((k * k).sum(2, True) + 1e-6)
    s = heads(lin(lin(x, "f_a_proj"), "f_b_proj") + w.raw("dt_bias"))
    g = -5 / (1 + torch.exp(-torch.exp(w.raw("A_log"))[:, None] * s))
    beta = 1 / (1 + torch.exp(-lin(x, "b_proj")))
    o = torch.empty(6, 3, 16).double()
    for h in range(3):
        rows = [u[:, h].tolist() for u in (q, k, v, g, beta)]
        o[:, h] = f64(scalar_delta_rule(*rows, [[0.0] * 16 for _ in range(16)])[0])
    z = lin(x, "g_proj") if full_rank else lin(lin(x, "g_a_proj"), "g_b_proj")
    o = o / torch.sqrt((o * o).mean(2, True) + 1e-5) * w.raw("o_norm.weight")
    assert relative(got, lin((o / (1 + torch.exp(-heads(z)))).flatten(1), "o_proj")) <= EXACT


def absorbed_mla(c: ModelConfig, w: Weights, x: Tensor) -> Tensor:
    """The decode form of specification 3.6: scores against the latent rows, values up-mapped."""
    latent, shared = w.linear(x, "kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim).split(
        [c.kv_lora_rank, c.qk_rope_head_dim], 1
    )
    latent = ops.rms(latent, w.tensor("kv_a_layernorm.weight", c.kv_lora_rank), 1e-6, exact)
    low = w.linear(x, "q_a_proj", c.q_lora_rank)
    low = ops.rms(low, w.tensor("q_a_layernorm.weight", c.q_lora_rank), 1e-6, exact)
    q = w.linear(low, "q_b_proj", c.num_heads * c.qk_head_dim).unflatten(1, (c.num_heads, -1))
    up = w.tensor("kv_b_proj.weight", c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), 40)
    k_up, v_up = up.unflatten(0, (c.num_heads, -1)).split([c.qk_nope_head_dim, c.v_head_dim], 1)
    query = torch.einsum("ihd,hdr->ihr", q[..., : c.qk_nope_head_dim], k_up)
    scores = torch.einsum("ihr,jr->hij", query, latent)
    scores = scores + torch.einsum("ihd,jd->hij", q[..., c.qk_nope_head_dim :], shared)
    later = torch.ones(len(x), len(x)).triu(1).bool()
    scores = (scores / math.sqrt(c.qk_head_dim)).masked_fill(later, -math.inf)
    read = torch.einsum("hij,jr,hvr->ihv", scores.softmax(-1), latent, v_up).flatten(1)
    gate = torch.sigmoid(w.linear(x, "g_proj", c.num_heads * c.v_head_dim))
    return w.linear(read * gate, "o_proj", c.hidden_size)


def mla_layer(scale: float = 1.0) -> tuple[Weights, Tensor]:
    tensors = random_tensors(K3)
    name = "language_model.model.layers.3.self_attn."
    for part in ("kv_a_proj_with_mqa", "q_a_proj"):
        tensors[f"{name}{part}.weight"] = tensors[f"{name}{part}.weight"] * scale
    x = torch.randn(9, K3.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    return Weights(tensors, torch.float64, exact, name), x


def test_expanded_attention_equals_absorbed_attention():
    weights, x = mla_layer()
    got, _ = blocks.mla(K3, weights, x, blocks.MlaState(torch.zeros(0, 46).double()))
    assert relative(got, absorbed_mla(K3, weights, x)) <= EXACT


def test_latent_norms_use_1e_6_whatever_the_configuration_says():
    """Inputs so small that eps decides: no tolerance on whole-model logits can see this."""
    weights, x = mla_layer(scale=1e-3)
    empty = blocks.MlaState(torch.zeros(0, 46).double())
    got, state = blocks.mla(replace(K3, rms_norm_eps=0.5), weights, x, empty)
    raw = x @ weights.tensor("kv_a_proj_with_mqa.weight", 46, 44).T
    want = raw[:, :40] / torch.sqrt(raw[:, :40].square().mean(1, keepdim=True) + 1e-6)
    assert relative(state.rows[:, :40], want * weights.tensor("kv_a_layernorm.weight", 40)) <= EXACT
    assert torch.equal(state.rows[:, 40:], raw[:, 40:])  # neither normed nor rotated
    assert relative(got, absorbed_mla(K3, weights, x)) <= EXACT
