"""Turns token ids and state into logits and state: the decoder of specification 3.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from k3tvm.checkpoint import Checkpoint
from k3tvm.errors import ConfigError
from k3tvm.reference import blocks, ops
from k3tvm.reference.blocks import KdaForm, KdaState, LayerState
from k3tvm.reference.weights import (
    Array,
    Weights,
    as_torch,
    exact,
    round_bfloat16,
    round_float16,
)
from k3tvm.relax_models.config import ModelConfig

# Called with the name of a point ("layers.3.mixer_in") and the tensor there.
Trace = Callable[[str, Tensor], None]
Precision = Literal["exact", "bfloat16", "float16"]
ROUNDING = {"exact": exact, "bfloat16": round_bfloat16, "float16": round_float16}


@dataclass(frozen=True)
class State:
    """All that later tokens need of earlier ones; never changed in place, so a copy is a fork."""

    length: int
    layers: tuple[LayerState, ...]


@dataclass
class Routing:
    """Expert choices by layer, one row of indices [k] per token from the start of the sequence.

    With `record` a run fills `picks`; without it a run takes its experts from `picks` and only
    computes their weights. Two runs that share choices differ by rounding alone.
    """

    record: bool = False
    picks: dict[int, Tensor] = field(default_factory=dict)

    def pinned(self) -> Routing:
        """The recorded choices, to be replayed."""
        return Routing(False, dict(self.picks))

    def apply(self, layer: int, start: int, chosen: Tensor) -> Tensor:
        """Records `chosen` [n, k] of the tokens from `start`, or gives what was recorded there."""
        known = self.picks.get(layer, chosen[:0])
        if self.record:
            self.picks[layer] = torch.cat((known[:start], chosen))
            return chosen
        rows = known[start : start + len(chosen)]
        if rows.shape != chosen.shape:
            raise ConfigError(
                f"{len(known)} tokens recorded, position {start + len(chosen) - 1} was asked",
                where=f"pinned routing of layer {layer}",
                cure="record a run over the same ids first",
            )
        return rows


class _CheckpointTensors(Mapping[str, Array]):
    """A checkpoint seen as a mapping; a tensor is read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Array:
        if name not in self._checkpoint.tensors:
            raise KeyError(name)
        return self._checkpoint.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)


class Reference:
    """The text model of one checkpoint in plain torch.

    `tensors` go by published names, prefix included. `dtype` is float64 for the truth and float32
    for the yardstick of our own kernels. precision="bfloat16" rounds where the official run does
    (specification 3.6b) and computes in `dtype` between; "float16" rounds at the same points.
    kda="chunk" is the closed form.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Array],
        dtype: torch.dtype = torch.float64,
        precision: Precision = "exact",
        kda: KdaForm = "step",
    ) -> None:
        self.config, self.dtype, self.kda_form = config, dtype, kda
        self.cast = ROUNDING[precision]
        self.top = Weights(tensors, dtype, self.cast, config.tensor_prefix)
        self.model = self.top.at("model")

    @classmethod
    def from_checkpoint(
        cls,
        path: Path | str,
        dtype: torch.dtype = torch.float64,
        precision: Precision = "exact",
        kda: KdaForm = "step",
    ) -> Reference:
        """Opens a checkpoint folder, checks it whole, and reads tensors when they are needed."""
        checkpoint = Checkpoint.open(Path(path))
        checkpoint.check()
        return cls(checkpoint.config, _CheckpointTensors(checkpoint), dtype, precision, kda)

    def empty_state(self) -> State:
        """The state before the first token."""
        kinds = range(self.config.num_layers)
        return State(0, tuple(blocks.empty_state(self.config, i, self.dtype) for i in kinds))

    @torch.no_grad()
    def forward(
        self,
        ids: Sequence[int],
        state: State | None = None,
        routing: Routing | None = None,
        trace: Trace | None = None,
    ) -> tuple[Tensor, State]:
        """Logits [n, vocab] of all n ids and the state behind them.

        Any cut of a sequence into calls gives the same logits. `trace` sees, per layer, stream,
        mixer_in, mixer_out, router_pick, ffn_in and ffn_out, then final and logits.
        """
        state = state or self.empty_state()
        run = _Run(self, state, routing, trace or (lambda name, tensor: None))
        hidden = run.layers(self._embed(ids))
        run.trace("final", hidden)
        logits = self.top.linear(self._norm(hidden, "norm"), "lm_head", self.config.vocab_size)
        run.trace("logits", logits)
        return logits, State(state.length + len(ids), tuple(run.states))

    def _embed(self, ids: Sequence[int]) -> Tensor:
        wrong = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if wrong or not ids:
            raise ConfigError(
                f"{wrong[0]} is outside the vocabulary" if wrong else "there are none",
                where="token ids",
                cure=f"pass at least one id from 0 to {self.config.vocab_size - 1}",
            )
        # Rows first: the whole table in float64 would be the largest tensor of a small model.
        rows = self.model.raw("embed_tokens.weight")[list(ids)]
        return self.cast(as_torch(rows).to(self.dtype))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.model.tensor(f"{name}.weight", self.config.hidden_size)
        return ops.rms(x, weight, self.config.rms_norm_eps, self.cast)

    def _mix(self, bank: list[Tensor], stream: Tensor, name: str) -> Tensor:
        if not bank:
            return stream
        width = self.config.hidden_size
        norm = self.model.tensor(f"{name}_norm.weight", width)
        query = norm * self.model.tensor(f"{name}_proj.weight", 1, width)[0]
        return self.cast(ops.mix(bank, stream, query, self.config.rms_norm_eps))


class _Run:
    """One forward call: walks the layers, collecting their new states."""

    def __init__(
        self, reference: Reference, state: State, routing: Routing | None, trace: Trace
    ) -> None:
        self.of, self.before, self.routing, self.trace = reference, state, routing, trace
        self.states: list[LayerState] = []

    def layers(self, stream: Tensor) -> Tensor:
        """The stream [n, d] after all layers and the output mix (specification 3.2).

        A model without attention residuals never fills the bank, which leaves the plain residual.
        """
        of, block, bank = self.of, self.of.config.attn_res_block_size, list[Tensor]()
        for i in range(of.config.num_layers):
            name = f"layers.{i}"
            self.trace(f"{name}.stream", stream)
            mixed = of._mix(bank, stream, f"{name}.self_attention_res")
            update = self._mixer(i, of._norm(mixed, f"{name}.input_layernorm"))
            if block and i % block == 0:
                bank.append(stream)
                stream = update
            else:
                stream = of.cast(stream + update)
            mixed = of._mix(bank, stream, f"{name}.mlp_res")
            normed = of._norm(mixed, f"{name}.post_attention_layernorm")
            stream = of.cast(stream + self._ffn(i, normed))
        return of._mix(bank, stream, "output_attn_res")

    def _mixer(self, i: int, x: Tensor) -> Tensor:
        config, weights = self.of.config, self.of.model.at(f"layers.{i}.self_attn")
        self.trace(f"layers.{i}.mixer_in", x)
        before = self.before.layers[i]
        after: LayerState
        if isinstance(before, KdaState):
            out, after = blocks.kda(config, weights, x, before, self.of.kda_form)
        else:
            out, after = blocks.mla(config, weights, x, before)
        self.states.append(after)
        self.trace(f"layers.{i}.mixer_out", out)
        return out

    def _ffn(self, i: int, x: Tensor) -> Tensor:
        config, weights = self.of.config, self.of.model.at(f"layers.{i}")
        self.trace(f"layers.{i}.ffn_in", x)
        if config.ffn_kind(i) == "dense":
            out = blocks.dense(config, weights.at("mlp"), x, config.intermediate_size)
        else:
            out = blocks.moe(config, weights.at("block_sparse_moe"), x, lambda p: self._pin(i, p))
        self.trace(f"layers.{i}.ffn_out", out)
        return out

    def _pin(self, i: int, chosen: Tensor) -> Tensor:
        if self.routing is not None:
            chosen = self.routing.apply(i, self.before.length, chosen)
        self.trace(f"layers.{i}.router_pick", chosen)
        return chosen
