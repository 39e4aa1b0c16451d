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
    KdaStepFused,
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
    c = blocks.config
    h, d = c.kda_heads, c.kda_head_dim
    tail, state = (blocks.scope.input(a) for a in kda_states(blocks))
    x = blocks.mix_and_norm(stream, LAYER + "input_layernorm", LAYER + "self_attention_res")
    parts = blocks.project("in", c.hidden_size, x, _segments(blocks))
    fused = blocks.fused and blocks.form == "step"
    o = (_fused if fused else _mixed)(blocks, parts, stream.seqs, tail, state)
    addends = [] if restart else [stream.value]
    width = h * d
    out = blocks.linear("out", c.hidden_size, width, Slice(o, width), ATTN + "o_proj", addends)
    return out.tensor


def _mixed(blocks: Blocks, parts: dict[str, Slice], seqs: Expr, tail: Expr, state: Expr) -> Expr:
    """What lies between the projections, operator by operator."""
    c, g = blocks.config, blocks.graph
    h, d = c.kda_heads, c.kda_head_dim
    qkv = _convolve(blocks, parts["qkv"], seqs, tail)
    decay, beta = _gates(blocks, parts)
    op = (KdaStep if blocks.form == "step" else KdaChunk)(h, d, d, blocks.act)
    o = g.call(op, qkv, decay, beta, seqs, state)
    z = _output_gate(blocks, parts["gate"])
    norm = blocks.vector("o_norm", d, "vector", ATTN + "o_norm.weight")
    gated = GatedRmsNorm(h, d, c.rms_norm_eps, z.width, z.offset, blocks.act)
    return g.call(gated, o, z.tensor, norm)


def _fused(blocks: Blocks, parts: dict[str, Slice], seqs: Expr, tail: Expr, state: Expr) -> Expr:
    """The same as one operator; weights are declared in the same order."""
    c = blocks.config
    h, d = c.kda_heads, c.kda_head_dim
    qkv, beta = parts["qkv"], parts["beta"]
    taps = _taps(blocks)
    raw, bias, a = _decay_inputs(blocks, parts)
    z = _output_gate(blocks, parts["gate"])
    norm = blocks.vector("o_norm", d, "vector", ATTN + "o_norm.weight")
    bound = c.gate_lower_bound
    widths = (qkv.width, beta.width, beta.offset, z.width, z.offset)
    op = KdaStepFused(h, d, c.conv_kernel, bound, c.rms_norm_eps, *widths, blocks.act)
    rows = (qkv.tensor, taps, raw, beta.tensor, bias, a, z.tensor, norm)
    return blocks.graph.call(op, *rows, seqs, tail, state)


def _output_gate(blocks: Blocks, z: Slice) -> Slice:
    """The input of the gate after the norm, of full rank."""
    c = blocks.config
    if c.kda_full_rank_gate:
        return z
    width, d = c.kda_heads * c.kda_head_dim, c.kda_head_dim
    return blocks.linear("gate_up", width, d, z, ATTN + "g_b_proj")


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


def _taps(blocks: Blocks) -> Expr:
    """The filters of q, k and v."""
    c = blocks.config
    channels = 3 * c.kda_heads * c.kda_head_dim
    return blocks.taps(
        "conv", c.conv_kernel, channels, [ATTN + f"{p}_conv1d.weight" for p in "qkv"]
    )


def _convolve(blocks: Blocks, qkv: Slice, seqs: Expr, tail: Expr) -> Expr:
    """Convolution and SiLU of q, k and v; they stand first in their projection."""
    c = blocks.config
    channels = 3 * c.kda_heads * c.kda_head_dim
    op = ShortConv(channels, c.conv_kernel, qkv.width, blocks.act)
    return blocks.graph.call(op, qkv.tensor, _taps(blocks), seqs, tail)


def _decay_inputs(blocks: Blocks, parts: dict[str, Slice]) -> tuple[Expr, Expr, Expr]:
    """The low-rank forget gate in full rank, its bias and the rate of each head."""
    c = blocks.config
    h, d = c.kda_heads, c.kda_head_dim
    raw = blocks.linear("decay_up", h * d, d, parts["decay"], ATTN + "f_b_proj")
    bias = blocks.vector("dt_bias", h * d, "vector", ATTN + "dt_bias")
    a = blocks.vector("a", h, "exp_heads", ATTN + "A_log", rows=h)
    return raw.tensor, bias, a


def _gates(blocks: Blocks, parts: dict[str, Slice]) -> list[Expr]:
    """decay and beta, from the low-rank forget gate and the write gate."""
    c = blocks.config
    raw, bias, a = _decay_inputs(blocks, parts)
    beta = parts["beta"]
    op = KdaGate(c.kda_heads, c.kda_head_dim, c.gate_lower_bound, beta.width, beta.offset)
    return blocks.graph.call(op, raw, beta.tensor, bias, a)
