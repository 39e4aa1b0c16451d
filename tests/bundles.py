"""Makes example checkpoints and their bundles, each once per test session."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from k3tvm.checkpoint.example import write_example
from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.relax_models.operators import Activation
from k3tvm.runtime.engine import Engine
from tests.devices import require

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

    def bundle(self, preset: str, dtype: Activation = "float32", target: str = "cpu") -> Path:
        """Its bundle for a device of this machine, with three slots of 256 tokens."""
        path = self.folder / f"{preset}-{dtype}-{target.replace(':', '-')}.bundle"
        if path not in self.known:
            options = Options(target, dtype, slots=SLOTS, context=CONTEXT)
            compile_checkpoint(self.checkpoint(preset), path, options)
            self.known[path] = path
        return path

    def engine(
        self,
        preset: str,
        dtype: Activation = "float32",
        slots: int = SLOTS,
        target: str = "cpu",
    ) -> Engine:
        """A new engine on its bundle; its state and its copy of the weights are the caller's."""
        require(target)
        return Engine.open(self.bundle(preset, dtype, target), slots=slots)
