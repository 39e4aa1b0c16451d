"""The whole torch model: any cut of a prompt, state, the residual structure, precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from k3tvm.reference import Reference, Routing, blocks, ops
from k3tvm.reference.weights import (
    exact,
    round_bfloat16,
)
from tests.reference_checks import (
    in_chunks,
    nmse,
    random_ids,
    reference,
    relative,
)
from tests.reference_models import CONFIGS, K3, random_tensors
from tests.tolerances import tolerance

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = tolerance("reference_float64")


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
