"""The formulas of specification 3 on plain tensors, one function each, no parameters by name."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3tvm.reference.weights import Cast

# The official classes of q_a_layernorm and kv_a_layernorm ignore the config (specification 3.1).
LATENT_NORM_EPS = 1e-6
L2_EPS = 1e-6


def rms(x: Tensor, weight: Tensor, eps: float, cast: Cast) -> Tensor:
    """RMSNorm over the last axis; rounded before and after the weight (specification 3.1)."""
    return cast(cast(x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * cast(weight))


def l2n(x: Tensor) -> Tensor:
    """Unit length over the last axis, eps on the sum inside the root (specification 3.1)."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def mix(bank: list[Tensor], stream: Tensor, query: Tensor, eps: float) -> Tensor:
    """Attention residual: one softmax over the bank entries and the stream per token.

    bank and stream [n, d], query [d] = norm weight times projection. Values are not normalised,
    keys are (specification 3.3).
    """
    values = torch.stack([*bank, stream])
    keys = values / torch.sqrt(values.square().mean(-1, keepdim=True) + eps)
    shares = torch.softmax((keys * query).sum(-1), dim=0)
    return (shares[..., None] * values).sum(0)


def conv(x: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution and SiLU: x [n, c], tail [w-1, c], weight [c, 1, w].

    The last tap belongs to the current token. Returns the output [n, c] and the new tail
    (specification 3.4).
    """
    taps = weight.shape[-1]
    inputs = torch.cat((tail, x))
    out = sum(weight[:, 0, j] * inputs[j : j + len(x)] for j in range(taps))
    return silu(torch.as_tensor(out)), inputs[len(inputs) - (taps - 1) :]


def decay(raw: Tensor, dt_bias: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay g <= 0 per key channel: raw and dt_bias [.., h, k], a_log [h] (specification 3.4).

    `lower_bound` selects another activation, it is not a clamp. softplus is the exact one, without
    the switch to the identity above 20.
    """
    s, a = raw + dt_bias, a_log.exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(a * s)
    return -a * torch.logaddexp(s, torch.zeros_like(s))


def kda_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token (specification 3.4): the definition.

    q, k, g [n, h, K], v [n, h, V], beta [n, h], state [h, K, V]. Returns outputs [n, h, V] and the
    state after the last token.
    """
    outputs = []
    for t in range(len(q)):
        state = g[t].exp()[..., None] * state
        predicted = (k[t, :, None] @ state)[:, 0]
        write = beta[t, :, None] * (v[t] - predicted)
        state = state + k[t, :, :, None] * write[:, None]
        outputs.append((q[t, :, None] @ state)[:, 0])
    return torch.stack(outputs), state


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk in closed form (specification 3.5); shapes as in `kda_steps`.

    Each exp(G_i - G_j) is formed from the difference, so nothing overflows at any decay.
    """
    q, k, v, g, beta = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    total = g.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1]).tril().bool()
    ratio = (total[:, :, None] - total[:, None]).masked_fill(~later[..., None], -torch.inf).exp()
    attend = torch.einsum("hik,hjk,hijk->hij", q, k, ratio)
    couple = beta[..., None] * torch.einsum("hik,hjk,hijk->hij", k, k, ratio)
    wanted = beta[..., None] * (v - (k * total.exp()) @ state)
    # The diagonal of `couple` is not read: the system is unit lower triangular.
    write = torch.linalg.solve_triangular(couple, wanted, upper=False, unitriangular=True)
    out = (q * total.exp()) @ state + attend @ write
    last = total[:, -1:]
    state = last.exp().transpose(1, 2) * state + (k * (last - total).exp()).mT @ write
    return out.transpose(0, 1), state


def kda_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, size: int = 64
) -> tuple[Tensor, Tensor]:
    """`kda_steps` computed `size` tokens at a time, for long prompts."""
    outputs = []
    for start in range(0, len(q), size):
        part = slice(start, start + size)
        out, state = kda_chunk(q[part], k[part], v[part], g[part], beta[part], state)
        outputs.append(out)
    return torch.cat(outputs), state


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU gated unit; without `linear_beta` the up side is left alone (specification 3.7)."""
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def best(scores: Tensor, count: int) -> Tensor:
    """Indices [n, count] of the largest scores [n, e]; of equal scores the lower index wins."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def keep_groups(pick: Tensor, groups: int, kept: int) -> Tensor:
    """Sets experts outside the `kept` best groups to -inf: pick [n, e] (specification 3.7).

    A group counts as the sum of its two best picks.
    """
    if groups <= kept:
        return pick
    grouped = pick.unflatten(1, (groups, -1))
    score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    mask = torch.ones_like(score, dtype=torch.bool)
    mask.scatter_(1, best(score, kept), False)
    return grouped.masked_fill(mask[..., None], -torch.inf).flatten(1)
