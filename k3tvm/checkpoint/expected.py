"""Turns a ModelConfig into the exact list of tensors that its checkpoint must hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from k3tvm.checkpoint import names
from k3tvm.checkpoint.dims import dimensions, features
from k3tvm.checkpoint.tensor_info import ITEM_SIZE
from k3tvm.relax_models.config import ModelConfig


class TensorSpec(NamedTuple):
    """One tensor that a checkpoint must hold.

    `shape` and `dtypes[0]` are as published; `parameters` counts model parameters, so a packed
    byte counts two, a scale none, and the zeros that pad A_log none. `layer` and `expert` count
    from 0 and are None outside layers and experts.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: str
    parameters: int
    layer: int | None = None
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the published shape and dtype."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtypes[0]]


def expected_tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """All text tensors of the configuration (specification 2), in checkpoint spelling.

    Routed experts are MXFP4 or plain by `config.mxfp4_experts`, which `Checkpoint.open` sets by
    what the checkpoint holds.
    """
    return tuple(_all(config))


def _all(config: ModelConfig) -> Iterator[TensorSpec]:
    dims, prefix = dimensions(config), config.tensor_prefix
    for row in _rows(names.MODEL, config, dims, None):
        yield TensorSpec(prefix + row.name, *row[1:])
    for layer in range(config.num_layers):
        start = f"{prefix}model.layers.{layer}."
        for row in _rows(names.LAYER, config, dims, layer):
            yield TensorSpec(start + row.name, *row[1:5], layer)
        rows = list(_rows(names.EXPERT, config, dims, layer))
        for expert in range(config.num_experts if rows else 0):
            begin = f"{start}block_sparse_moe.experts.{expert}."
            for row in rows:
                yield TensorSpec(begin + row.name, *row[1:5], layer, expert)


def _rows(
    rules: tuple[names.Rule, ...], config: ModelConfig, dims: dict[str, int], layer: int | None
) -> Iterator[TensorSpec]:
    """The rules that apply, with shapes filled in and names still without their beginning."""
    on = features(config, layer)
    for rule in rules:
        if on.issuperset(rule.when.split()):
            shape = tuple(dims[name] for name in rule.shape.split())
            count = math.prod(shape) * {"packed": 2, "scale": 0}.get(rule.storage, 1)
            stored = _decay_shape(config) if rule.storage == "decay" else shape
            yield TensorSpec(rule.pattern, stored, _dtypes(rule, config), rule.role, count)


def _dtypes(rule: names.Rule, config: ModelConfig) -> tuple[str, ...]:
    accepted = names.DTYPES[rule.storage]
    declared = config.weight_dtype
    if rule.storage != "linear" or accepted[0] == declared:
        return accepted
    return (declared, *(name for name in accepted if name != declared))


def _decay_shape(config: ModelConfig) -> tuple[int, ...]:
    """A_log as published: padded to the head width by K3, with unit axes by Kimi-Linear."""
    heads = config.kda_heads
    if config.family == "kimi-linear":
        return (1, 1, heads, 1)
    return (max(heads, config.kda_head_dim),)
