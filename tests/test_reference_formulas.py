"""Each formula of the torch reference against scalar Python written from its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from k3tvm.reference import ops
from k3tvm.reference.weights import (
    exact,
    round_bfloat16,
)
from tests.reference_checks import (
    f64,
    relative,
    scalar_delta_rule,
)
from tests.tolerances import tolerance

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = tolerance("reference_float64")


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
