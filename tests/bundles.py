"""Makes example checkpoints and their bundles, each once per test session."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from k3tvm.checkpoint.example import write_example
from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.relax_models.operators import Activation
from k3tvm.runtime.engine import Engine

SEED = 1
SLOTS, CONTEXT = 3, 256


@dataclass(frozen=True)
class Bundles:
    """Checkpoints and bundles of presets below `folder`; tests must not change what they get."""

    folder: Path
    known: dict[Path, Path] = field(default_factory=dict)

    def checkpoint(self, preset: str) -> Path:
        """The example checkpoint of a preset."""
        path = self.folder / preset
        if path not in self.known:
            self.known[path] = write_example(path, preset, SEED)
        return path

    def bundle(self, preset: str, dtype: Activation = "float32") -> Path:
        """Its bundle for this machine, with three slots of 256 tokens."""
        path = self.folder / f"{preset}-{dtype}.bundle"
        if path not in self.known:
            options = Options(activations=dtype, slots=SLOTS, context=CONTEXT)
            compile_checkpoint(self.checkpoint(preset), path, options)
            self.known[path] = path
        return path

    def engine(self, preset: str, dtype: Activation = "float32", slots: int = SLOTS) -> Engine:
        """A new engine on its bundle; its state and its copy of the weights are the caller's."""
        return Engine.open(self.bundle(preset, dtype), slots=slots)
