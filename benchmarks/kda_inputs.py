"""Inputs of a KDA layer, alike for every implementation, and the recurrence in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """One measurement: `sequences` of `tokens` tokens each; dim: of keys and of values."""

    heads: int
    dim: int
    tokens: int
    sequences: int

    @property
    def name(self) -> str:
        """What a row of the table is called."""
        kind = "decode" if self.tokens == 1 else "prefill"
        return f"{kind} H={self.heads} B={self.sequences} T={self.tokens} K=V={self.dim}"

    def least_bytes(self, activation: int) -> int:
        """What must be moved with inputs and results of so many bytes an element; the decay and the
        state have four.
        """
        rows = self.sequences * self.tokens * self.heads
        state = self.sequences * self.heads * self.dim**2
        return rows * (4 * self.dim * activation + activation + 4 * self.dim) + 8 * state


@dataclass(frozen=True)
class Inputs:
    """float32 arrays: q, k, v and log_decay [B, T, H, D], beta [B, T, H], state [B, H, D, D].

    Values of q, k, v and beta are those that bfloat16 has.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array
    state: Array


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Normal queries, keys and values; log decay even in (-5, 0); beta even in (0, 1)."""
    rng = np.random.default_rng(seed)
    shape = (case.sequences, case.tokens, case.heads, case.dim)

    def normal() -> Array:
        return as_bfloat16(rng.standard_normal(shape, np.float32))

    return Inputs(
        normal(),
        normal(),
        normal(),
        rng.random(shape, np.float32) * np.float32(-5),
        as_bfloat16(rng.random(shape[:3], np.float32)),
        rng.standard_normal((shape[0], case.heads, case.dim, case.dim), np.float32),
    )


def as_bfloat16(values: Array) -> Array:
    """float32 values cut off to those that bfloat16 has."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def recurrence(torch: Any, x: Inputs) -> tuple[Array, Array]:
    """Outputs [B, T, H, D] and states after the last token, in float64, token by token."""
    q, k, v, g, beta, state = (
        torch.from_numpy(a).double() for a in (x.q, x.k, x.v, x.log_decay, x.beta, x.state)
    )
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / q.shape[-1] ** 0.5
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    outputs = []
    for t in range(q.shape[1]):
        state = state * torch.exp(g[:, t])[..., None]
        predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write = beta[:, t][..., None] * (v[:, t] - predicted)
        state = state + k[:, t][..., None] * write[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1).numpy(), state.numpy()


def distance(got: Array, want: Array) -> float:
    """Squared difference over squared values (NMSE); infinity where something is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.sum((got - want) ** 2) / np.sum(want**2))
