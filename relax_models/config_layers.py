"""Turns `linear_attn_config` into layer kinds, counted from 0, and the sizes of KDA layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from k3tvm.errors import ConfigError
from k3tvm.relax_models.config_reader import (
    Fields,
    below_zero,
    boolean,
    natural,
    optional,
    positive,
)

Parts = dict[str, Any]


def layers(fields: Fields, count: int) -> Parts:
    """Layer kinds and KDA sizes of a model with `count` layers.

    The file counts layers from 1 (specification 1.1); together its two lists must name each layer
    exactly once, or a ConfigError tells the first one that is doubled or left out.
    """
    fields.need("linear_attn_config")
    linear = fields.take_object("linear_attn_config")
    off: Parts = dict.fromkeys(("kda_heads", "kda_head_dim", "conv_kernel"), 0)
    off |= {"gate_lower_bound": None, "kda_full_rank_gate": False}
    if linear is None:
        return off | {"layer_kinds": ("mla",) * count}
    kda = _layer_list(linear, "kda_layers", count)
    full = _layer_list(linear, "full_attn_layers", count)
    _check_partition(linear, kda, full, count)
    kernel = linear.take("short_conv_kernel_size", positive)
    if kernel < 2:
        linear.refuse("short_conv_kernel_size", "is not implemented, it must be at least 2")
    parts = {
        "kda_heads": linear.take("num_heads", positive),
        "kda_head_dim": linear.take("head_dim", positive),
        "conv_kernel": kernel,
        "gate_lower_bound": linear.take_or("gate_lower_bound", optional(below_zero), None),
        "kda_full_rank_gate": linear.take_or("use_full_rank_gate", boolean, False),
    }
    linear.finish(())
    kinds = tuple("kda" if layer in kda else "mla" for layer in range(1, count + 1))
    return (parts if kda else off) | {"layer_kinds": kinds}


def _layer_list(fields: Fields, name: str, count: int) -> frozenset[int]:
    listed = fields.take(name, _numbers)
    doubled = [layer for layer, times in Counter(listed).items() if times > 1]
    if doubled:
        fields.refuse(name, f"lists layer {doubled[0]} twice", "list each layer once")
    outside = [layer for layer in listed if not 1 <= layer <= count]
    if outside:
        cure = "layers are counted from 1, up to 'num_hidden_layers'"
        fields.refuse(name, f"lists layer {outside[0]} of {count}", cure)
    return frozenset(listed)


def _numbers(value: object) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must be a list of layer numbers")
    return [natural(item) for item in value]


def _check_partition(fields: Fields, kda: frozenset[int], full: frozenset[int], count: int) -> None:
    both, neither = sorted(kda & full), sorted(set(range(1, count + 1)) - kda - full)
    if both or neither:
        kind = f"layer {both[0]} is in both" if both else f"layer {neither[0]} is in neither"
        raise ConfigError(
            f"{kind} of 'kda_layers' and 'full_attn_layers'",
            where=fields.where,
            cure=f"each of the layers 1 to {count} must stand in exactly one of them",
        )
