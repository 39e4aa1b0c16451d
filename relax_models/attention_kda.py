"""The KDA mixer: gated delta rule with a decay per channel (specification 3.4)."""

from __future__ import annotations

from k3tvm.relax_models.blocks import LAYER, Blocks, Segment, Stream
from k3tvm.relax_models.graph import Expr, Slice
from k3tvm.relax_models.operators import (
    Arg,
    GatedRmsNorm,
    KdaChunk,
    KdaGate,
    KdaStep,
    ShortConv,
)

ATTN = LAYER + "self_attn."


def kda_states(blocks: Blocks) -> tuple[Arg, ...]:
    """What one KDA layer keeps per slot: convolution tail and recurrent state (specification 5)."""
    c = blocks.config
    h, d = c.kda_heads, c.kda_head_dim
    return (
        Arg("conv", ("slots", c.conv_kernel - 1, 3 * h * d), role="inout"),
        Arg("kda", ("slots", h, d, d), role="inout"),
    )


def kda_mixer(blocks: Blocks, stream: Stream, restart: bool) -> Expr:
    """The block: norm, projections, convolution, recurrence, gated norm, output projection.

    `restart`: a new AttnRes block begins here, so the result is not added to the stream.
    """
    c, g = blocks.config, blocks.graph
    h, d = c.kda_heads, c.kda_head_dim
    tail, state = (blocks.scope.input(a) for a in kda_states(blocks))
    x = blocks.mix_and_norm(stream, LAYER + "input_layernorm", LAYER + "self_attention_res")
    parts = blocks.project("in", c.hidden_size, x, _segments(blocks))
    qkv = _convolve(blocks, parts["qkv"], stream.seqs, tail)
    decay, beta = _gates(blocks, parts)
    op = (KdaStep if blocks.form == "step" else KdaChunk)(h, d, d, blocks.act)
    o = g.call(op, qkv, decay, beta, stream.seqs, state)
    z = parts["gate"]
    if not c.kda_full_rank_gate:
        z = blocks.linear("gate_up", h * d, d, z, ATTN + "g_b_proj")
    norm = blocks.vector("o_norm", d, "vector", ATTN + "o_norm.weight")
    gated = GatedRmsNorm(h, d, c.rms_norm_eps, z.width, z.offset, blocks.act)
    o = g.call(gated, o, z.tensor, norm)
    addends = [] if restart else [stream.value]
    width = h * d
    out = blocks.linear("out", c.hidden_size, width, Slice(o, width), ATTN + "o_proj", addends)
    return out.tensor


def _segments(blocks: Blocks) -> list[Segment]:
    c = blocks.config
    width = c.kda_heads * c.kda_head_dim
    full = c.kda_full_rank_gate
    gate = Segment(
        "gate", width if full else c.kda_head_dim, (ATTN + ("g_proj" if full else "g_a_proj"),)
    )
    return [
        Segment("qkv", 3 * width, tuple(ATTN + f"{p}_proj" for p in "qkv")),
        gate,
        Segment("decay", c.kda_head_dim, (ATTN + "f_a_proj",)),
        Segment("beta", c.kda_heads, (ATTN + "b_proj",)),
    ]


def _convolve(blocks: Blocks, qkv: Slice, seqs: Expr, tail: Expr) -> Expr:
    """Convolution and SiLU of q, k and v; they stand first in their projection."""
    c = blocks.config
    channels = 3 * c.kda_heads * c.kda_head_dim
    op = ShortConv(channels, c.conv_kernel, qkv.width, blocks.act)
    weight = blocks.taps(
        "conv", c.conv_kernel, channels, [ATTN + f"{p}_conv1d.weight" for p in "qkv"]
    )
    return blocks.graph.call(op, qkv.tensor, weight, seqs, tail)


def _gates(blocks: Blocks, parts: dict[str, Slice]) -> list[Expr]:
    """decay and beta, from the low-rank forget gate and the write gate."""
    c = blocks.config
    h, d = c.kda_heads, c.kda_head_dim
    raw = blocks.linear("decay_up", h * d, d, parts["decay"], ATTN + "f_b_proj")
    beta = parts["beta"]
    op = KdaGate(h, d, c.gate_lower_bound, beta.width, beta.offset)
    bias = blocks.vector("dt_bias", h * d, "vector", ATTN + "dt_bias")
    a = blocks.vector("a", h, "exp_heads", ATTN + "A_log", rows=h)
    return blocks.graph.call(op, raw.tensor, beta.tensor, bias, a)
