"""Turns a preset's name and a seed into a random checkpoint in exactly the published layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from k3tvm.checkpoint.expected import TensorSpec, expected_tensors
from k3tvm.checkpoint.index import INDEX_NAMES
from k3tvm.checkpoint.presets import PRESETS
from k3tvm.checkpoint.random_weights import RandomWeights
from k3tvm.checkpoint.writer import write_index, write_json, write_shard
from k3tvm.errors import CheckpointError, ConfigError
from k3tvm.relax_models.config import ModelConfig

# Marks a folder as ours, so that a second run may replace it and a real checkpoint is safe.
MARKER = "k3tvm-example.json"
Progress = Callable[[int, int], None]  # bytes written, bytes in all


def write_example(
    folder: str | Path, preset: str, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Write a random checkpoint and return its folder.

    The bytes depend on preset and seed alone. There is one shard a layer and one for the rest,
    as published; `config.json` comes last, so an interrupted run leaves no loadable checkpoint.
    A folder with anything but an earlier example is refused with a CheckpointError, an unknown
    preset or a seed outside 0..2^63-1 with a ConfigError.
    """
    if preset not in PRESETS:
        cure = "choose one of " + ", ".join(PRESETS)
        raise ConfigError(f"no preset is called {preset!r}", cure=cure)
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed {seed} is out of range", cure="take one from 0 to 2^63-1")
    chosen = PRESETS[preset]
    config = ModelConfig.from_json(chosen.config, preset)
    root = _prepare(Path(folder))
    write_json(root / MARKER, {"preset": preset, "seed": seed})
    shards = _shards(expected_tensors(config))
    total = sum(spec.nbytes for specs in shards.values() for spec in specs)
    weights = RandomWeights(seed, config.kda_heads, chosen.drawn)
    written = 0
    for name, specs in shards.items():
        write_shard(root / name, specs, weights.make)
        written += sum(spec.nbytes for spec in specs)
        if progress:
            progress(written, total)
    write_index(root, shards)
    write_json(root / "config.json", chosen.config)
    return root


def _shards(specs: tuple[TensorSpec, ...]) -> dict[str, list[TensorSpec]]:
    """Shard names in order with their tensors: layer i whole in shard i+1, the rest last."""
    groups: defaultdict[int, list[TensorSpec]] = defaultdict(list)
    layers = 1 + max(spec.layer for spec in specs if spec.layer is not None)
    for spec in specs:
        groups[layers if spec.layer is None else spec.layer].append(spec)
    count = layers + 1
    return {f"model-{i + 1:05d}-of-{count:05d}.safetensors": groups[i] for i in range(count)}


def _prepare(root: Path) -> Path:
    """An empty folder, or an earlier example with its files removed."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        present = sorted(root.iterdir())
    except OSError as fault:
        what = f"cannot be made a folder ({fault.strerror})"
        raise CheckpointError(what, where=str(root), cure="choose another place") from None
    if present and not (root / MARKER).is_file():
        what = "is not empty and was not written by this command"
        raise CheckpointError(what, where=str(root), cure="choose a new or an empty folder")
    for path in present:
        name = path.name.removesuffix(".part")
        ours = name in ("config.json", INDEX_NAMES[0]) or name.startswith("model-")
        if ours and path.is_file():
            path.unlink()
    return root
