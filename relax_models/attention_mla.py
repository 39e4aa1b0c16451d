"""The MLA mixer without positions, absorbed: queries meet the latent cache (specification 3.6)."""

from __future__ import annotations

from k3tvm.relax_models.blocks import LAYER, Blocks, Segment, Stream
from k3tvm.relax_models.graph import Expr, Slice
from k3tvm.relax_models.operators import Arg, Linear, MlaAttention, MlaCache, SigmoidGate

ATTN = LAYER + "self_attn."
NORM_EPS = 1e-6  # of both latent norms, whatever rms_norm_eps says (specification 3.1)


def mla_states(blocks: Blocks) -> tuple[Arg, ...]:
    """What one MLA layer keeps per slot: a row of [c_kv | k_pe] per token (specification 5)."""
    c = blocks.config
    width = c.kv_lora_rank + c.qk_rope_head_dim
    return (Arg("cache", ("slots", "cap", width), role="inout"),)


def mla_mixer(blocks: Blocks, stream: Stream, restart: bool) -> Expr:
    """The block: norm, projections, latent norms and cache, attention, gate, output projection."""
    c, g = blocks.config, blocks.graph
    h, dv = c.num_heads, c.v_head_dim
    (cache,) = (blocks.scope.input(a) for a in mla_states(blocks))
    x = blocks.mix_and_norm(stream, LAYER + "input_layernorm", LAYER + "self_attention_res")
    parts = blocks.project("in", c.hidden_size, x, _segments(blocks))
    q = _query(blocks, parts, stream.seqs, cache)
    o = _attend(blocks, q, stream.seqs, cache)
    if c.mla_output_gate:
        z = parts["gate"]
        gate = SigmoidGate(h * dv, z.width, z.offset, blocks.act)
        o = g.call(gate, o, z.tensor)
    addends = [] if restart else [stream.value]
    x = Slice(o, h * dv)
    return blocks.linear("out", c.hidden_size, h * dv, x, ATTN + "o_proj", addends).tensor


def _segments(blocks: Blocks) -> list[Segment]:
    """The latents stand together, since one kernel norms both."""
    c = blocks.config
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    stems: tuple[str, ...] = (ATTN + "kv_a_proj_with_mqa",)
    if c.q_lora_rank:
        stems = (ATTN + "q_a_proj", *stems)
    segments = [Segment("latents", (c.q_lora_rank or 0) + latent, stems)]
    if not c.q_lora_rank:
        width = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        segments.append(Segment("query", width, (ATTN + "q_proj",)))
    if c.mla_output_gate:
        segments.append(Segment("gate", c.num_heads * c.v_head_dim, (ATTN + "g_proj",)))
    return segments


def _query(blocks: Blocks, parts: dict[str, Slice], seqs: Expr, cache: Expr) -> Slice:
    """Write the cache rows of these tokens; return their queries [n, heads * (nope + rope)]."""
    c = blocks.config
    rank, q_rank = c.kv_lora_rank, c.q_lora_rank or 0
    x = parts["latents"]
    kv_offset = x.offset + q_rank
    op = MlaCache(
        q_rank, rank, c.qk_rope_head_dim, NORM_EPS, x.width, x.offset, kv_offset, blocks.act
    )
    if q_rank:
        q_norm = blocks.vector("q_norm", q_rank, "vector", ATTN + "q_a_layernorm.weight")
    else:
        q_norm = blocks.vector("q_norm", 1, "zeros")
    kv_norm = blocks.vector("kv_norm", rank, "vector", ATTN + "kv_a_layernorm.weight")
    latent = blocks.graph.call(op, x.tensor, q_norm, kv_norm, seqs, cache)
    if not q_rank:
        return parts["query"]
    width = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    return blocks.linear("query", width, q_rank, Slice(latent, q_rank), ATTN + "q_b_proj")


def _attend(blocks: Blocks, q: Slice, seqs: Expr, cache: Expr) -> Expr:
    """Absorb the key projection into the query, attend, and expand the values.

    The absorbed query has no counterpart in the official bfloat16 run, which expands keys and
    values; it stays float32.
    """
    c, g = blocks.config, blocks.graph
    h, rank, dv = c.num_heads, c.kv_lora_rank, c.v_head_dim
    nope, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
    stem = ATTN + "kv_b_proj"
    fmt = blocks.stored([stem])
    key = Linear(rank, nope, fmt, "float32", q.width, q.offset, h, nope + rope)
    weight = blocks.matrix("key", key, "absorb_key", [stem], rows=rank, split=nope)
    absorbed = g.call(key, q.tensor, *weight)
    scale = (nope + rope) ** -0.5
    attention = MlaAttention(h, rank, rope, nope, scale, q.width, q.offset, nope + rope, blocks.act)
    latent = g.call(attention, absorbed, q.tensor, cache, seqs)
    value = Linear(dv, rank, fmt, blocks.act, h * rank, 0, h, rank)
    weight = blocks.matrix("value", value, "absorb_value", [stem], rows=dv, split=nope)
    return g.call(value, latent, *weight)
