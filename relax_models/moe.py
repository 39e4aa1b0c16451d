"""Feed-forward blocks: dense, or routed experts with shared ones (specification 3.7)."""

from __future__ import annotations

from k3tvm.relax_models.blocks import LAYER, Blocks, Segment, Stream
from k3tvm.relax_models.graph import Expr, Slice
from k3tvm.relax_models.operators import (
    ExpertCombine,
    ExpertLinear,
    ExpertSort,
    Glu,
    Router,
    WeightFormat,
)

MLP = LAYER + "mlp."
MOE = LAYER + "block_sparse_moe."


def _input(blocks: Blocks, stream: Stream) -> Slice:
    return blocks.mix_and_norm(stream, LAYER + "post_attention_layernorm", LAYER + "mlp_res")


def _glu(blocks: Blocks, x: Slice, width: int, parts: int = 1) -> Slice:
    """The activation of [gate | up] pairs of `width` columns each."""
    c = blocks.config
    op = Glu(
        width, parts, x.width, x.offset, c.hidden_act, c.situ_beta, c.situ_linear_beta, blocks.act
    )
    return Slice(blocks.graph.call(op, x.tensor), parts * width)


def dense_block(blocks: Blocks, stream: Stream) -> Expr:
    """stream + down(act(gate x, up x))."""
    c = blocks.config
    f, x = c.intermediate_size, _input(blocks, stream)
    pair = Segment("gate_up", 2 * f, (MLP + "gate_proj", MLP + "up_proj"))
    both = blocks.project("in", c.hidden_size, x, [pair])["gate_up"]
    hidden = _glu(blocks, both, f)
    down = MLP + "down_proj"
    return blocks.linear("out", c.hidden_size, f, hidden, down, [stream.value]).tensor


def moe_block(blocks: Blocks, stream: Stream) -> Expr:
    """(stream + (experts(x) + shared(x)), chosen experts); the sum in brackets is taken first."""
    c = blocks.config
    x = _input(blocks, stream)
    parts = blocks.project("in", c.hidden_size, x, _segments(blocks), exact="router")
    chosen, weights = _route(blocks, parts["router"])
    y = _experts(blocks, parts["latent"] if c.latent_size else x, chosen)
    addends = [stream.value]
    if c.num_shared_experts:
        hidden = _glu(blocks, parts["shared"], c.shared_size)
        down = MOE + "shared_experts.down_proj"
        shared = blocks.linear("shared_out", c.hidden_size, c.shared_size, hidden, down)
        addends = [shared.tensor, stream.value]
    if c.latent_size:
        latent = Slice(_combine(blocks, y, weights, []), c.latent_size)
        up = MOE + "routed_expert_up_proj"
        out = blocks.linear("out", c.hidden_size, c.latent_size, latent, up, addends).tensor
    else:
        out = _combine(blocks, y, weights, addends)
    return blocks.graph.pair(out, chosen)


def _segments(blocks: Blocks) -> list[Segment]:
    c = blocks.config
    segments = [Segment("router", c.num_experts, (MOE + "gate",))]
    if c.latent_size:
        segments.append(Segment("latent", c.latent_size, (MOE + "routed_expert_down_proj",)))
    if c.num_shared_experts:
        stems = (MOE + "shared_experts.gate_proj", MOE + "shared_experts.up_proj")
        segments.append(Segment("shared", 2 * c.shared_size, stems))
    return segments


def _route(blocks: Blocks, logits: Slice) -> list[Expr]:
    """Chosen experts and their weights; the router's logits stand first in their projection."""
    c = blocks.config
    op = Router(
        c.num_experts,
        c.experts_per_token,
        c.num_expert_group,
        c.topk_group,
        # a single expert keeps its own score, as in the official code (see docs/peers.md)
        c.renormalize and c.experts_per_token > 1,
        c.routed_scaling_factor,
        logits.width,
    )
    name = MOE + "gate.e_score_correction_bias"
    bias = blocks.vector("router_bias", c.num_experts, "vector", name)
    return blocks.graph.call(op, logits.tensor, bias)


def _experts(blocks: Blocks, x: Slice, chosen: Expr) -> Expr:
    """w2(act(w1 x, w3 x)) of every chosen expert: [n, top_k * width]."""
    c, g = blocks.config, blocks.graph
    e, k, f = c.num_experts, c.experts_per_token, c.moe_intermediate_size
    first, order = g.call(ExpertSort(e, k), chosen)
    routing = (chosen, first, order)
    gate_up = [MOE + "experts.{expert}.w1", MOE + "experts.{expert}.w3"]
    both = _expert_linear(blocks, "experts_in", 2 * f, c.expert_width, x, gate_up, routing, False)
    hidden = _glu(blocks, both, f, parts=k)
    down = [MOE + "experts.{expert}.w2"]
    y = _expert_linear(blocks, "experts_out", c.expert_width, f, hidden, down, routing, True)
    return y.tensor


def _expert_linear(
    blocks: Blocks,
    name: str,
    rows: int,
    k: int,
    x: Slice,
    stems: list[str],
    routing: tuple[Expr, Expr, Expr],
    per_choice: bool,
) -> Slice:
    c = blocks.config
    fmt: WeightFormat = blocks.stored(stems)
    op = ExpertLinear(
        c.num_experts, c.experts_per_token, rows, k, fmt, per_choice, x.width, x.offset, blocks.act
    )
    weight = blocks.matrix(name, op, "expert_rows", stems, rows=rows, experts=c.num_experts)
    out = blocks.graph.call(op, x.tensor, *weight, *routing)
    return Slice(out, c.experts_per_token * rows)


def _combine(blocks: Blocks, y: Expr, weights: Expr, addends: list[Expr]) -> Expr:
    """The weighted sum over the chosen experts, normed in a latent that has a norm."""
    c = blocks.config
    norm = bool(c.latent_size and c.latent_norm)
    op = ExpertCombine(
        c.experts_per_token, c.expert_width, norm, c.rms_norm_eps, len(addends), blocks.act
    )
    if norm:
        source = MOE + "routed_expert_norm.weight"
        norm_weight = blocks.vector("latent_norm", c.expert_width, "vector", source)
    else:
        norm_weight = blocks.vector("latent_norm", 1, "zeros")
    return blocks.graph.call(op, y, weights, norm_weight, *addends)
