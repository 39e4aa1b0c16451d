"""The torch reference against hand-written formulas, its own other forms, and changed configs."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from k3tvm.checkpoint import Checkpoint
from k3tvm.checkpoint.example import write_example
from k3tvm.errors import CheckpointError, ConfigError
from k3tvm.reference import Reference, Routing, blocks, ops
from k3tvm.reference.weights import (
    Weights,
    as_torch,
    decode_mxfp4,
    exact,
    round_bfloat16,
)
from k3tvm.relax_models.config import ModelConfig
from tests.reference_models import CONFIGS, K3, LINEAR, nmse, random_ids, random_tensors, relative
from tests.tolerances import tolerance

MOE_OF_LAYER_2 = "language_model.model.layers.2.block_sparse_moe."
EXACT = tolerance("reference_float64")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny: a second thread only waits, and waits long when the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reference(config: ModelConfig, seed: int = 0, **options) -> Reference:
    return Reference(config, random_tensors(config, seed), **options)


def in_chunks(
    model: Reference, ids: list[int], size: int, routing: Routing | None = None
) -> Tensor:
    parts, state = [], None
    for start in range(0, len(ids), size):
        out, state = model.forward(ids[start : start + size], state, routing)
        parts.append(out)
    return torch.cat(parts)


# --- formulas, each against scalar Python written from its definition -----------------------------


def test_rms_norm_puts_eps_on_the_mean_and_rounds_before_the_weight():
    x, w = f64([[3e-3, -4e-3]]), f64([2.0, 1.0])
    root = math.sqrt((9e-6 + 16e-6) / 2 + 1e-5)
    assert ops.rms(x, w, 1e-5, exact)[0].tolist() == pytest.approx([6e-3 / root, -4e-3 / root])
    x, w = torch.linspace(-3, 4, 50).double()[None], torch.linspace(0.5, 1.5, 50).double()
    inner = x / x.square().mean().sqrt()
    twice = (inner.bfloat16() * w.bfloat16()).double()
    assert torch.equal(ops.rms(x, w, 0.0, round_bfloat16), twice)
    assert not torch.equal((inner * w.bfloat16()).bfloat16().double(), twice)


def test_l2_norm_puts_eps_on_the_sum_inside_the_root():
    x = f64([[6e-4, 8e-4]])
    root = math.sqrt(1e-6 + 1e-6)
    assert ops.l2n(x)[0].tolist() == pytest.approx([6e-4 / root, 8e-4 / root], rel=1e-14)


def test_mix_normalises_keys_but_not_values():
    bank, stream = [[1.0, 2.0], [-4.0, 0.5]], [0.3, -0.2]
    query, eps = [0.7, -1.1], 0.01
    sources = [*bank, stream]
    keys = [[v / math.sqrt(sum(u * u for u in s) / 2 + eps) for v in s] for s in sources]
    scores = [math.exp(sum(k * q for k, q in zip(key, query, strict=True))) for key in keys]
    want = [
        sum(p * s[d] for p, s in zip(scores, sources, strict=True)) / sum(scores) for d in (0, 1)
    ]
    rows = [f64([s]) for s in sources]
    assert ops.mix(rows[:2], rows[2], f64(query), eps)[0].tolist() == (
        pytest.approx(want, rel=1e-14)
    )


def test_f4_convolution_reads_oldest_first_and_hands_over_its_tail():
    weight = f64([[[1.0, 10.0, 100.0, 1000.0]]])
    x, zero = torch.arange(1.0, 7.0).double()[:, None], torch.zeros(3, 1).double()
    whole, tail = ops.conv(x, zero, weight)
    assert whole[:4, 0].tolist() == [1000.0, 2100.0, 3210.0, 4321.0]
    assert tail[:, 0].tolist() == [4.0, 5.0, 6.0]
    for cut in range(1, 6):
        first, between = ops.conv(x[:cut], zero, weight)
        second, last = ops.conv(x[cut:], between, weight)
        assert torch.equal(torch.cat((first, second)), whole) and torch.equal(last, tail)


def test_f9_the_bounded_gate_is_another_activation_and_no_clamp():
    raw = f64([[[0.25], [-40.0], [40.0]]])
    bias, log = f64([[0.75]] * 3), f64([math.log(2.0)] * 3)
    bounded = ops.decay(raw, bias, log, -5.0)[0, :, 0].tolist()
    unbounded = ops.decay(raw, bias, log, None)[0, :, 0].tolist()
    sigmoid = [1 / (1 + math.exp(-2 * (r + 0.75))) for r in (0.25, -40.0, 40.0)]
    assert bounded == pytest.approx([-5 * s for s in sigmoid], rel=1e-14)
    softplus = [math.log1p(math.exp(r + 0.75)) for r in (0.25, -40.0, 40.0)]
    assert unbounded == pytest.approx([-2 * s for s in softplus], rel=1e-14)


def test_situ_squashes_both_sides_and_leaves_up_alone_without_its_beta():
    g, u = f64([3.0]), f64([40.0])
    gate = 4 * math.tanh(0.75) / (1 + math.exp(-3))
    assert ops.situ(g, u, 4.0, 25.0).item() == pytest.approx(gate * 25 * math.tanh(1.6), rel=1e-14)
    assert ops.situ(g, u, 4.0, None).item() == pytest.approx(gate * 40, rel=1e-14)


def scalar_delta_rule(q, k, v, g, beta, state):
    """The recurrence of specification 3.4 for one head on nested lists."""
    outputs = []
    for t in range(len(q)):
        keys, values = range(len(k[t])), range(len(v[t]))
        state = [[math.exp(g[t][i]) * state[i][j] for j in values] for i in keys]
        seen = [sum(k[t][i] * state[i][j] for i in keys) for j in values]
        write = [beta[t] * (v[t][j] - seen[j]) for j in values]
        state = [[state[i][j] + k[t][i] * write[j] for j in values] for i in keys]
        outputs.append([sum(q[t][i] * state[i][j] for i in keys) for j in values])
    return outputs, state


def kda_inputs(tokens: int, decays: str, heads: int = 2, keys: int = 12, values: int = 7):
    """Unit q, k, with key width unlike value width (F3), and decays as in specification 9."""
    r = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r, dtype=torch.float64)

    uniform = torch.rand(tokens, heads, keys, generator=r, dtype=torch.float64)
    g = {
        "typical": -5 * torch.sigmoid(normal(tokens, heads, keys) - 3),
        "uniform": -5 * uniform,
        "floor": torch.full((tokens, heads, keys), -5.0, dtype=torch.float64),
        "unbounded": -40 * uniform,
        "none": torch.zeros(tokens, heads, keys, dtype=torch.float64),
    }[decays]
    q, k = ops.l2n(normal(tokens, heads, keys)), ops.l2n(normal(tokens, heads, keys))
    beta = torch.sigmoid(normal(tokens, heads))
    return q, k, normal(tokens, heads, values), g, beta, normal(heads, keys, values)


def test_f3_the_recurrence_decays_predicts_writes_then_reads():
    inputs = kda_inputs(5, "typical")
    out, state = ops.kda_steps(*inputs)
    for h in range(2):
        *rows, start = [x[:, h].tolist() for x in inputs[:5]] + [inputs[5][h].tolist()]
        want, want_state = scalar_delta_rule(*rows, start)
        assert relative(out[:, h], f64(want)) <= EXACT
        assert relative(state[h], f64(want_state)) <= EXACT


@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 65, 200])
@pytest.mark.parametrize("decays", ["typical", "uniform", "floor", "unbounded", "none"])
def test_f10_the_chunk_form_equals_the_recurrence_at_every_decay(decays, tokens):
    inputs = kda_inputs(tokens, decays)
    for got, want in zip(ops.kda_chunks(*inputs), ops.kda_steps(*inputs), strict=True):
        assert relative(got, want) <= tolerance("reference_chunk")


# --- tensors as stored ----------------------------------------------------------------------------


def test_f14_every_scale_byte_and_code_has_its_exact_value():
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = [*magnitudes, *(-m for m in magnitudes)]
    packed = torch.tensor([c | c + 1 << 4 for c in range(0, 16, 2)] * 2, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    got = decode_mxfp4(packed.expand(255, -1), scales, torch.float64)
    for scale in range(255):
        assert got[scale].tolist() == [v * 2.0 ** (scale - 127) for v in values] * 2
    assert math.copysign(1, got[127, 8].item()) == -1
    with pytest.raises(CheckpointError, match="255"):
        decode_mxfp4(packed[None], torch.tensor([[255]], dtype=torch.uint8), torch.float64)


def test_f13_the_low_nibble_is_the_even_element():
    packed = torch.tensor([[0x21] + [0] * 15], dtype=torch.uint8)
    got = decode_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8), torch.float32)
    assert got[0].tolist() == [0.5, 1.0] + [0.0] * 30


def test_f14_scales_as_e8m0_are_the_same_bytes():
    byte = torch.tensor([[120, 0, 254]], dtype=torch.uint8)
    assert torch.equal(as_torch(byte.view(torch.float8_e8m0fnu)), byte)


def test_f8_a_log_is_per_head_in_all_three_stored_forms():
    config, ids = replace(K3, gate_lower_bound=None), random_ids(K3, 20)
    tensors = random_tensors(config)
    want, _ = Reference(config, tensors).forward(ids)
    name = "language_model.model.layers.1.self_attn.A_log"
    plain = tensors[name]
    for form in (torch.cat((plain, torch.zeros(13).double())), plain.reshape(1, 1, -1, 1)):
        got, _ = Reference(config, tensors | {name: form}).forward(ids)
        assert torch.equal(got, want)
    for wrong in (torch.cat((plain, f64([0.0, 1e-9]))), plain[:-1]):
        with pytest.raises(CheckpointError, match="A_log"):
            Reference(config, tensors | {name: wrong}).forward(ids)


def test_f19_a_missing_or_misshapen_tensor_is_named():
    tensors = random_tensors(K3)
    name = "language_model.model.layers.3.self_attn.q_b_proj.weight"
    with pytest.raises(CheckpointError, match="shape.*q_b_proj|q_b_proj.*shape"):
        Reference(K3, tensors | {name: tensors[name].T}).forward([1])
    tensors.pop(name)
    with pytest.raises(CheckpointError, match="q_b_proj.weight.*missing"):
        Reference(K3, tensors).forward([1])


@pytest.mark.parametrize("ids", [[], [-1], [3, K3.vocab_size]])
def test_f11_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ConfigError, match="token ids"):
        reference(K3).forward(ids)


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 16, 64, 65])
@pytest.mark.parametrize("name", ["k3-groups", "k3-softplus", "linear"])
def test_f2_any_chunking_equals_one_prompt(name, size):
    model, ids = reference(CONFIGS[name]), random_ids(CONFIGS[name], 70)
    assert relative(in_chunks(model, ids, size), model.forward(ids)[0]) <= EXACT


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 17])
def test_f4_short_prompts_are_prefixes_of_longer_ones(name, length):
    model, ids = reference(CONFIGS[name]), random_ids(CONFIGS[name], 20)
    want, _ = model.forward(ids)
    assert relative(model.forward(ids[:length])[0], want[:length]) <= EXACT


@pytest.mark.parametrize("name", CONFIGS)
def test_f2_the_chunked_model_equals_the_recurrent_one(name):
    ids = random_ids(CONFIGS[name], 130)
    want, _ = reference(CONFIGS[name]).forward(ids)
    got = in_chunks(reference(CONFIGS[name], kda="chunk"), ids, 100)
    assert relative(got, want) <= tolerance("reference_chunk")


def test_f6_later_tokens_do_not_change_earlier_logits():
    model, ids = reference(K3, kda="chunk"), random_ids(K3, 80)
    other = [*ids[:33], *reversed(ids[33:])]
    before, after = model.forward(ids)[0], model.forward(other)[0]
    assert relative(after[:33], before[:33]) <= EXACT
    assert nmse(after[33:], before[33:]) > 0.1


def test_f5_a_state_is_not_changed_by_the_runs_that_start_from_it():
    model, ids = reference(K3), random_ids(K3, 30)
    _, state = model.forward(ids[:20])
    first, _ = model.forward(ids[20:], state)
    model.forward(ids[5:25], state)
    again, end = model.forward(ids[20:], state)
    assert torch.equal(first, again) and end.length == 30
    assert nmse(model.forward(ids[20:])[0], first) > 0.1  # the state is used at all


def test_f1_each_part_of_the_state_is_needed_by_the_next_turn():
    model, ids = reference(K3), random_ids(K3, 24)
    _, state = model.forward(ids[:20])
    want, _ = model.forward(ids[20:], state)
    fresh = model.empty_state()
    for i in (2, 3):
        layers = [*state.layers[:i], fresh.layers[i], *state.layers[i + 1 :]]
        got, _ = model.forward(ids[20:], replace(state, layers=tuple(layers)))
        assert nmse(got, want) > 1e-4
    kda = state.layers[2]
    assert isinstance(kda, blocks.KdaState)
    for lost in (replace(kda, tail=kda.tail * 0), replace(kda, memory=kda.memory * 0)):
        layers = [*state.layers[:2], lost, *state.layers[3:]]
        got, _ = model.forward(ids[20:], replace(state, layers=tuple(layers)))
        assert nmse(got, want) > 1e-4


# --- structure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k3", "linear"])
def test_the_decoder_starts_at_the_embedding_and_ends_at_the_head(name):
    config, seen = CONFIGS[name], {}
    tensors, ids = random_tensors(config), random_ids(config, 5)
    got, _ = Reference(config, tensors).forward(ids, trace=lambda n, x: seen.update({n: x}))
    top = {n.removeprefix(config.tensor_prefix): t for n, t in tensors.items()}
    assert torch.equal(seen["layers.0.stream"], top["model.embed_tokens.weight"][ids])
    last = config.num_layers - 1
    stream = seen[f"layers.{last}.stream"]
    stream = stream + seen[f"layers.{last}.mixer_out"] + seen[f"layers.{last}.ffn_out"]
    if config.attn_res_block_size:
        bank = [seen[f"layers.{i}.stream"] for i in (0, 3, 6)]
        query = top["model.output_attn_res_norm.weight"] * top["model.output_attn_res_proj.weight"]
        stream = ops.mix(bank, stream, query[0], 1e-5)
    normed = ops.rms(stream, top["model.norm.weight"], 1e-5, exact)
    assert relative(got, normed @ top["lm_head.weight"].T) <= EXACT


@pytest.mark.parametrize("block", [1, 3, 4, 8, 12])
def test_attention_residuals_restart_the_stream_at_each_block(block):
    config, seen = replace(K3, attn_res_block_size=block), {}
    reference(config).forward(random_ids(K3, 5), trace=lambda name, x: seen.update({name: x}))
    for i in range(config.num_layers - 1):
        update = seen[f"layers.{i}.mixer_out"] + seen[f"layers.{i}.ffn_out"]
        start = 0 if i % block == 0 else seen[f"layers.{i}.stream"]
        assert relative(seen[f"layers.{i + 1}.stream"], start + update) <= EXACT


def test_attention_residuals_mix_the_raw_streams_of_block_starts():
    tensors, seen = random_tensors(K3), {}
    Reference(K3, tensors).forward(random_ids(K3, 5), trace=lambda n, x: seen.update({n: x}))
    at = "language_model.model.layers.4."
    bank = [seen[f"layers.{i}.stream"] for i in (0, 3)]
    query = tensors[f"{at}mlp_res_norm.weight"] * tensors[f"{at}mlp_res_proj.weight"][0]
    stream = seen["layers.4.stream"] + seen["layers.4.mixer_out"]
    mixed = ops.mix(bank, stream, query, K3.rms_norm_eps)
    norm = tensors[f"{at}post_attention_layernorm.weight"]
    want = ops.rms(mixed, norm, K3.rms_norm_eps, exact)
    assert relative(seen["layers.4.ffn_in"], want) <= EXACT


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


# --- experts --------------------------------------------------------------------------------------


def test_f15_of_equal_scores_the_lower_index_wins():
    scores = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0] * 5])
    assert ops.best(scores, 2).tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("kept", "groups"), [(1, {1}), (2, {1, 2}), (3, {0, 1, 2}), (4, {0, 1, 2, 3})]
)
def test_f15_groups_are_ranked_by_their_two_best_and_others_masked(kept, groups):
    pick = torch.tensor([[0.75, 0, 0, 0.5, 0.5, 0, 0.4375, 0.4375, 0.4375, 0.5, 0.25, 0.125]])
    masked = ops.keep_groups(pick, 4, kept)[0].unflatten(0, (4, 3))
    for group in range(4):
        whole = torch.equal(masked[group], pick[0, 3 * group : 3 * group + 3])
        assert whole if group in groups else (masked[group] == -math.inf).all()


def router(config: ModelConfig, bias: Tensor | None = None) -> Weights:
    r = torch.Generator().manual_seed(5)
    count = config.num_experts
    weight = torch.randn(count, config.hidden_size, generator=r).double() / 7
    noise = torch.randn(count, generator=r).double() * 0.3
    tensors = {"weight": weight, "e_score_correction_bias": noise if bias is None else bias}
    return Weights(tensors, torch.float64, exact)


@pytest.mark.parametrize(("count", "k"), [(896, 16), (7, 3), (12, 12), (1, 1)])
def test_f15_the_bias_selects_and_never_weighs(count, k):
    config = replace(K3, num_experts=count, experts_per_token=k, routed_scaling_factor=1.7)
    w = router(config)
    x = torch.randn(300, 44, generator=torch.Generator().manual_seed(2)).double()
    chosen, share = blocks.route(config, w, x, lambda picked: picked)
    score = torch.sigmoid(x @ w.tensor("weight", count, 44).T)
    biased = (score + w.tensor("e_score_correction_bias", count)).tolist()
    for t, row in enumerate(biased):
        want = sorted(range(count), key=lambda e: (-row[e], e))[:k]
        assert chosen[t].tolist() == want
        total = sum(score[t, e].item() for e in want) if k > 1 else 1.0
        assert share[t].tolist() == pytest.approx(
            [1.7 * score[t, e].item() / total for e in want], rel=1e-12
        )


def test_f15_masked_groups_stay_out_even_when_all_picks_are_negative():
    config = replace(K3, num_expert_group=4, topk_group=1)
    w = router(config, torch.full((12,), -3.0).double())
    x = torch.randn(50, 44, generator=torch.Generator().manual_seed(2)).double()
    chosen, _ = blocks.route(config, w, x, lambda picked: picked)
    assert ((chosen // 3) == (chosen[:, :1] // 3)).all()


def test_experts_are_summed_by_weight_token_by_token():
    config, tensors = CONFIGS["linear"], random_tensors(CONFIGS["linear"])
    w = Weights(tensors, torch.float64, exact, "model.layers.2.block_sparse_moe.")
    x = torch.randn(6, 44, generator=torch.Generator().manual_seed(3)).double()
    chosen = torch.tensor([[0, 3, 11]] * 3 + [[3, 2, 0]] * 3)
    share = torch.rand(6, 3, generator=torch.Generator().manual_seed(4)).double()
    got = blocks.experts(config, w, x, chosen, share)
    for t in range(6):
        want = torch.zeros(44).double()
        for e, weight in zip(chosen[t].tolist(), share[t].tolist(), strict=True):
            w1, w2, w3 = (w.raw(f"experts.{e}.w{i}.weight") for i in (1, 2, 3))
            gate = w1 @ x[t]
            want += weight * (w2 @ (gate * torch.sigmoid(gate) * (w3 @ x[t])))
        assert relative(got[t], want) <= EXACT


def test_f16_latent_experts_are_normed_once_and_shared_experts_see_the_whole_stream():
    config = CONFIGS["k3-one-expert"]
    w = Weights(random_tensors(config), torch.float64, exact, MOE_OF_LAYER_2)
    x = torch.randn(6, 44, generator=torch.Generator().manual_seed(3)).double()
    got = blocks.moe(config, w, x, lambda picked: picked)

    def lin(u: Tensor, name: str) -> Tensor:
        return u @ w.cache.tensors[f"{MOE_OF_LAYER_2}{name}.weight"].T

    def unit(u: Tensor, gate: str, up: str, down: str) -> Tensor:
        g, v = lin(u, gate), lin(u, up)
        g = 4 * torch.tanh(g / 4) / (1 + torch.exp(-g))
        return lin(g * 25 * torch.tanh(v / 25), down)

    y = unit(lin(x, "routed_expert_down_proj"), *(f"experts.0.w{i}" for i in (1, 3, 2)))
    y = y / (1 + torch.exp(-lin(x, "gate")))
    y = y / torch.sqrt((y * y).mean(1, True) + 1e-5) * w.raw("routed_expert_norm.weight")
    shared = unit(x, *(f"shared_experts.{side}_proj" for side in ("gate", "up", "down")))
    assert relative(got, lin(y, "routed_expert_up_proj") + shared) <= EXACT


def test_pinned_routing_replays_choices_and_weighs_them_anew():
    config, ids = CONFIGS["k3-groups"], random_ids(K3, 40)
    model, whole, parts = reference(config), Routing(record=True), Routing(record=True)
    want, _ = model.forward(ids, routing=whole)
    in_chunks(model, ids, 7, parts)
    assert all(torch.equal(whole.picks[i], parts.picks[i]) for i in range(1, 8))
    assert torch.equal(model.forward(ids, routing=whole.pinned())[0], want)
    assert relative(in_chunks(model, ids, 9, whole.pinned()), want) <= EXACT
    moved = Routing(picks={i: (p + 1) % 12 for i, p in whole.picks.items()})
    assert nmse(model.forward(ids, routing=moved)[0], want) > 1e-3
    with pytest.raises(ConfigError, match="pinned routing of layer 1"):
        model.forward([*ids, 1], routing=whole.pinned())


# --- configuration --------------------------------------------------------------------------------

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


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_stays_near_float64_with_pinned_routing(name):
    config, routing = CONFIGS[name], Routing(record=True)
    ids, tensors = random_ids(config, 65), random_tensors(config)
    want, _ = Reference(config, tensors).forward(ids, routing=routing)
    got, _ = Reference(config, tensors, torch.float32).forward(ids, routing=routing.pinned())
    assert got.dtype == torch.float32 and got.isfinite().all()
    assert 0 < relative(got.double(), want) <= tolerance("reference_float32")


@pytest.mark.parametrize("name", CONFIGS)
def test_f12_bfloat16_rounds_activations_but_not_gates_and_state(name):
    config, seen, routing = CONFIGS[name], {}, Routing(record=True)
    ids, tensors = random_ids(config, 40), random_tensors(config)
    want, _ = Reference(config, tensors).forward(ids, routing=routing)
    rounded = Reference(config, tensors, precision="bfloat16")
    got, state = rounded.forward(
        ids, routing=routing.pinned(), trace=lambda n, x: seen.update({n: x})
    )
    assert 1e-7 < nmse(got, want) <= tolerance("reference_bfloat16")
    for point, x in seen.items():
        assert point.endswith("router_pick") or torch.equal(round_bfloat16(x), x), point
    for layer in state.layers:
        if isinstance(layer, blocks.KdaState):
            assert torch.equal(round_bfloat16(layer.tail), layer.tail)
            assert not torch.equal(round_bfloat16(layer.memory), layer.memory)
        else:
            assert torch.equal(round_bfloat16(layer.rows), layer.rows)


# --- whole folders --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["k3-tiny", "kimi-linear-tiny"])
def test_f30_a_checkpoint_folder_gives_the_logits_of_its_tensors(tmp_path, preset, monkeypatch):
    write_example(tmp_path / "model", preset, 3)
    monkeypatch.chdir(tmp_path)
    model = Reference.from_checkpoint("model", torch.float32)
    ids = random_ids(model.config, 12)
    checkpoint = Checkpoint.open(tmp_path / "model")
    tensors = {name: as_torch(checkpoint.tensor(name)) for name in checkpoint.tensors}
    want, _ = Reference(checkpoint.config, tensors, torch.float32).forward(ids)
    assert torch.equal(model.forward(ids)[0], want) and want.std() > 0.01


def test_f19_a_folder_that_does_not_fit_its_config_is_refused(tmp_path):
    write_example(tmp_path, "k3-dense-tiny", 3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="embed_tokens"):
        Reference.from_checkpoint(tmp_path)
