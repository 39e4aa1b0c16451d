"""Turns the normed stream of one layer into its update: KDA, MLA, dense FFN, latent MoE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3tvm.errors import CheckpointError
from k3tvm.reference import ops
from k3tvm.reference.weights import Weights, as_torch
from k3tvm.relax_models.config import ModelConfig

KdaForm = Literal["step", "chunk"]
# Gets the top-k indices [n, k] the router chose and returns those to use.
Pin = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KdaState:
    """After some tokens: tail [3, conv_kernel-1, h*K] (q, k, v; oldest first), memory [h, K, V]."""

    tail: Tensor
    memory: Tensor


@dataclass(frozen=True)
class MlaState:
    """One row per token so far: [length, kv_lora_rank + qk_rope_head_dim], normed | not normed."""

    rows: Tensor


LayerState = KdaState | MlaState


def empty_state(config: ModelConfig, layer: int, dtype: torch.dtype) -> LayerState:
    """The state of a layer before the first token (specification 5)."""
    if config.layer_kinds[layer] == "mla":
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return MlaState(torch.zeros(0, width, dtype=dtype))
    heads, dim = config.kda_heads, config.kda_head_dim
    return KdaState(
        torch.zeros(3, config.conv_kernel - 1, heads * dim, dtype=dtype),
        torch.zeros(heads, dim, dim, dtype=dtype),
    )


def per_head_log(w: Weights, heads: int) -> Tensor:
    """`A_log` [heads] out of [heads], a zero-padded longer vector, or [1, 1, heads, 1].

    The decay is per head; entries past the heads must be zero padding (specification 7.1).
    """
    stored = as_torch(w.raw("A_log")).flatten().to(w.dtype)
    if len(stored) < heads or bool(stored[heads:].any()):
        raise CheckpointError(
            f"expected one value for each of {heads} heads, then only zeros, in {len(stored)}",
            where=f"{w.prefix}A_log",
            cure="the decay is per head: fetch the tensor again, or correct num_heads",
        )
    return stored[:heads]


def kda(
    c: ModelConfig, w: Weights, x: Tensor, state: KdaState, form: KdaForm
) -> tuple[Tensor, KdaState]:
    """Kimi delta attention on x [n, d] (specification 3.4); gates and state stay unrounded."""
    heads, dim, eps = c.kda_heads, c.kda_head_dim, c.rms_norm_eps
    width = heads * dim
    mixed, tails = [], []
    for j, side in enumerate("qkv"):
        taps = w.tensor(f"{side}_conv1d.weight", width, 1, c.conv_kernel)
        out, tail = ops.conv(w.linear(x, f"{side}_proj", width), state.tail[j], taps)
        mixed.append(out.unflatten(1, (heads, dim)))
        tails.append(tail)
    q, k, v = mixed
    raw = w.linear(w.linear(x, "f_a_proj", dim), "f_b_proj", width).unflatten(1, (heads, dim))
    bias = w.tensor("dt_bias", width).unflatten(0, (heads, dim))
    g = ops.decay(raw, bias, per_head_log(w, heads), c.gate_lower_bound)
    beta = torch.sigmoid(w.linear(x, "b_proj", heads))
    rule = ops.kda_steps if form == "step" else ops.kda_chunks
    o, memory = rule(ops.l2n(q) * dim**-0.5, ops.l2n(k), v, g, beta, state.memory)
    if c.kda_full_rank_gate:
        z = w.linear(x, "g_proj", width)
    else:
        z = w.linear(w.linear(x, "g_a_proj", dim), "g_b_proj", width)
    o = ops.rms(o, w.tensor("o_norm.weight", dim), eps, lambda kept: kept)
    o = w.cast(o.flatten(1) * torch.sigmoid(z))
    return w.linear(o, "o_proj", c.hidden_size), KdaState(torch.stack(tails), memory)


def mla(c: ModelConfig, w: Weights, x: Tensor, state: MlaState) -> tuple[Tensor, MlaState]:
    """Latent attention without positions, keys and values expanded per head (specification 3.6)."""
    heads, nope, rope, rank = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    q_in, q_name = x, "q_proj"
    if c.q_lora_rank is not None:
        norm = w.tensor("q_a_layernorm.weight", c.q_lora_rank)
        q_in = ops.rms(w.linear(x, "q_a_proj", c.q_lora_rank), norm, ops.LATENT_NORM_EPS, w.cast)
        q_name = "q_b_proj"
    q = w.linear(q_in, q_name, heads * (nope + rope)).unflatten(1, (heads, nope + rope))
    latent, shared_key = w.linear(x, "kv_a_proj_with_mqa", rank + rope).split([rank, rope], 1)
    latent = ops.rms(latent, w.tensor("kv_a_layernorm.weight", rank), ops.LATENT_NORM_EPS, w.cast)
    rows = torch.cat((state.rows, torch.cat((latent, shared_key), 1)))

    expanded = w.linear(rows[:, :rank], "kv_b_proj", heads * (nope + c.v_head_dim))
    k, v = expanded.unflatten(1, (heads, -1)).split([nope, c.v_head_dim], 2)
    k = torch.cat((k, rows[:, None, rank:].expand(-1, heads, -1)), 2)
    scores = w.cast(torch.einsum("ihd,jhd->hij", q, k)) * (nope + rope) ** -0.5
    hidden = torch.ones(len(x), len(rows)).triu(len(state.rows) + 1).bool()
    shares = w.cast(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1))
    o = w.cast(torch.einsum("hij,jhd->ihd", shares, v)).flatten(1)
    if c.mla_output_gate:
        o = w.cast(o * w.cast(torch.sigmoid(w.linear(x, "g_proj", o.shape[1]))))
    return w.linear(o, "o_proj", c.hidden_size), MlaState(rows)


def glu(c: ModelConfig, w: Weights, x: Tensor, width: int, names: tuple[str, str, str]) -> Tensor:
    """Gated MLP of inner `width`; `names` are its gate, up and down maps (specification 3.7)."""
    gate, up, down = names
    g, u = w.linear(x, gate, width), w.linear(x, up, width)
    if c.hidden_act == "situ":
        inner = ops.situ(g, u, c.situ_beta, c.situ_linear_beta)
    else:
        inner = torch.nn.functional.silu(g) * u
    return w.linear(w.cast(inner), down, x.shape[1])


def dense(c: ModelConfig, w: Weights, x: Tensor, width: int) -> Tensor:
    """A dense MLP: layer 0, the shared experts, and models without experts."""
    return glu(c, w, x, width, ("gate_proj", "up_proj", "down_proj"))


def route(c: ModelConfig, w: Weights, x: Tensor, pin: Pin) -> tuple[Tensor, Tensor]:
    """Expert indices and weights [n, k]; the bias selects but never weighs (specification 3.7)."""
    logits = x @ w.tensor("weight", c.num_experts, c.hidden_size).T
    scores = torch.sigmoid(logits)
    pick = scores + w.tensor("e_score_correction_bias", c.num_experts)
    pick = ops.keep_groups(pick, c.num_expert_group, c.topk_group)
    chosen = pin(ops.best(pick, c.experts_per_token))
    share = scores.gather(1, chosen)
    # A single expert keeps its own score: the official file normalises only sums of several.
    if c.renormalize and c.experts_per_token > 1:
        share = share / (share.sum(1, keepdim=True) + 1e-20)
    return chosen, share * c.routed_scaling_factor


def experts(c: ModelConfig, w: Weights, z: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    """Weighted sum of the chosen experts on z [n, expert_width], one expert at a time."""
    total = torch.zeros_like(z)
    for e in chosen.unique().tolist():
        rows, slots = (chosen == e).nonzero(as_tuple=True)
        out = glu(c, w.at(f"experts.{e}"), z[rows], c.moe_intermediate_size, ("w1", "w3", "w2"))
        total.index_add_(0, rows, share[rows, slots, None] * out)
    return w.cast(total)


def moe(c: ModelConfig, w: Weights, x: Tensor, pin: Pin) -> Tensor:
    """Routed experts, in the latent width if the model has one, plus shared experts on x."""
    chosen, share = route(c, w.at("gate"), x, pin)
    z = x if c.latent_size is None else w.linear(x, "routed_expert_down_proj", c.latent_size)
    y = experts(c, w, z, chosen, share)
    if c.latent_norm:
        norm = w.tensor("routed_expert_norm.weight", c.expert_width)
        y = ops.rms(y, norm, c.rms_norm_eps, w.cast)
    if c.latent_size is not None:
        y = w.linear(y, "routed_expert_up_proj", c.hidden_size)
    if c.num_shared_experts:
        y = w.cast(y + dense(c, w.at("shared_experts"), x, c.shared_size))
    return y
