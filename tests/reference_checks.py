"""Turns runs of the torch reference into numbers to compare."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3tvm.reference import Reference, Routing
from k3tvm.reference.blocks import KdaForm
from k3tvm.relax_models.config import ModelConfig
from tests.reference_models import random_tensors


def random_ids(c: ModelConfig, count: int, seed: int = 7) -> list[int]:
    """Token ids of the model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, c.vocab_size, (count,), generator=generator).tolist()


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude of `want`; NaN in either counts as infinite."""
    error = float((got - want).abs().max() / want.abs().max())
    return error if error == error else float("inf")


def nmse(got: Tensor, want: Tensor) -> float:
    """Squared error over squared magnitude of `want`."""
    return float((got - want).square().sum() / want.square().sum())


def f64(values: list) -> Tensor:
    """A float64 tensor of nested lists, without a stop in float32."""
    return torch.tensor(values, dtype=torch.float64)


def reference(config: ModelConfig, seed: int = 0, kda: KdaForm = "step") -> Reference:
    """The float64 reference on random tensors."""
    return Reference(config, random_tensors(config, seed), kda=kda)


def in_chunks(
    model: Reference, ids: list[int], size: int, routing: Routing | None = None
) -> Tensor:
    """Logits of a prompt read `size` tokens at a time."""
    parts, state = [], None
    for start in range(0, len(ids), size):
        out, state = model.forward(ids[start : start + size], state, routing)
        parts.append(out)
    return torch.cat(parts)


def scalar_delta_rule(
    q: list, k: list, v: list, g: list, beta: list, state: list
) -> tuple[list, list]:
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
