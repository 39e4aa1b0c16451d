"""Target profiles: what a device can do, as data that the schedules read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Isa = Literal["avx512", "avx2", "portable"]


@dataclass(frozen=True)
class TargetProfile:
    """Facts about a target that choose and shape kernels.

    kind: the device family ("cpu"). name: what a user reads. mcpu, mtriple, mattr: for code
    generation.
    isa: the vector instructions that kernels may name; everything else is left to the compiler.
    tasks: into how many parts grouped work is split; a small multiple of the threads, so that
    every thread gets long contiguous runs of weights and an equal share.
    """

    kind: Literal["cpu"]
    name: str
    mcpu: str
    isa: Isa
    mtriple: str | None = None
    mattr: tuple[str, ...] = ()
    tasks: int = 16

    def tvm_target(self) -> dict[str, Any]:
        """The target as TVM takes it."""
        target: dict[str, Any] = {"kind": "llvm", "mcpu": self.mcpu, "mattr": list(self.mattr)}
        return target | ({"mtriple": self.mtriple} if self.mtriple else {})

    @property
    def fma(self) -> bool:
        """Whether fused multiply-add is one instruction (else multiply and add, never a call)."""
        return self.isa != "portable"
