"""The parameter plan of a model: which array stands where in which file, before any is written."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from k3tvm.bundle.manifest import ArrayEntry
from k3tvm.bundle.params import FOLDER, Unit, align
from k3tvm.checkpoint.checkpoint import Checkpoint
from k3tvm.relax_models.config import ModelConfig
from k3tvm.relax_models.parameters import Parameter
from k3tvm.schedules.layouts import ROWS


def plan_units(
    parameters: Sequence[Parameter], config: ModelConfig, checkpoint: Checkpoint
) -> list[Unit]:
    """One unit (file) for the embedding, each layer and the head, in the order of the model."""
    origin = _origin(checkpoint)
    units = []
    for name, members in itertools.groupby(parameters, key=lambda p: unit_name(p.name)):
        group = list(members)
        arrays = tuple(_layout(name, group, config))
        end = arrays[-1].offset + arrays[-1].nbytes
        text = json.dumps([origin, *(asdict(p) for p in group)], sort_keys=True)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        units.append(Unit(name, arrays, align(end), fingerprint))
    return units


def unit_name(parameter: str) -> str:
    """ "layers.3.mixer.norm" -> "layers.3"; "embed.table" -> "embed"."""
    words = parameter.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


def _layout(
    unit: str, parameters: Sequence[Parameter], config: ModelConfig
) -> Iterator[ArrayEntry]:
    at = 0
    for p in parameters:
        nbytes = math.prod(p.shape) * np.dtype(p.dtype).itemsize
        yield ArrayEntry(
            p.name,
            p.shape,
            p.dtype,
            f"{FOLDER}/{unit}.bin",
            at,
            nbytes,
            _touched(p, nbytes, config),
            p.recipe,
            p.sources,
        )
        at = align(at + nbytes)


def _touched(p: Parameter, nbytes: int, config: ModelConfig) -> int:
    """Bytes of the parameter that one token must read."""
    if p.recipe == "table":
        return nbytes // p.rows
    if p.recipe == "expert_rows":
        nbytes = nbytes // p.experts * config.experts_per_token
    if not p.recipe.endswith("rows") and not p.recipe.startswith("absorb"):
        return nbytes
    return nbytes * p.rows // (-(-p.rows // ROWS) * ROWS)


def _origin(checkpoint: Checkpoint) -> str:
    """What a converted file depends on besides the plan: every shard's size and last change."""
    shards = sorted({info.shard for info in checkpoint.tensors.values()})
    facts = []
    for shard in shards:
        stat = shard.stat()
        facts.append([shard.name, stat.st_size, stat.st_mtime_ns])
    return json.dumps(facts)
