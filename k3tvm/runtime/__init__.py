"""The runtime: opens a bundle and computes logits, tokens and snapshots of state."""

from k3tvm.runtime.engine import Engine
from k3tvm.runtime.generate import generate
from k3tvm.runtime.health import BadLogits
from k3tvm.runtime.sampling import Sampler
from k3tvm.runtime.state import Snapshot

__all__ = ["BadLogits", "Engine", "Sampler", "Snapshot", "generate"]
