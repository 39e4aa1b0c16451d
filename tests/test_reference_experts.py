"""Router and experts of the torch reference: selection, ties, groups, weights, pinned choices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k3tvm.errors import ConfigError
from k3tvm.reference import Routing, blocks, ops
from k3tvm.reference.weights import (
    Weights,
    exact,
)
from k3tvm.relax_models.config import ModelConfig
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

MOE_OF_LAYER_2 = "language_model.model.layers.2.block_sparse_moe."
EXACT = tolerance("reference_float64")


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
