"""Target profiles: what a device can do, as data that the schedules read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Isa = Literal["avx512", "avx2", "portable"]


@dataclass(frozen=True)
class CpuProfile:
    """Facts about a CPU that choose and shape kernels.

    name: what a user reads. mcpu, mtriple, mattr: for code generation.
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

    family = "cpu"

    def tvm_target(self) -> dict[str, Any]:
        """The target as TVM takes it."""
        target: dict[str, Any] = {"kind": "llvm", "mcpu": self.mcpu, "mattr": list(self.mattr)}
        return target | ({"mtriple": self.mtriple} if self.mtriple else {})

    @property
    def fma(self) -> bool:
        """Whether fused multiply-add is one instruction (else multiply and add, never a call)."""
        return self.isa != "portable"


Feature = Literal[
    "float16",
    "int8",
    "int16",
    "int64",
    "float64",
    "storage8",
    "storage16",
    "subgroup_arithmetic",
    "subgroup_shuffle",
    "cooperative_matrix",
]


# Feature -> option of a TVM target; TVM has no word for subgroup operations
OPTIONS: dict[Feature, str] = {
    "float16": "supports_float16",
    "int8": "supports_int8",
    "int16": "supports_int16",
    "int64": "supports_int64",
    "float64": "supports_float64",
    "storage8": "supports_8bit_buffer",
    "storage16": "supports_16bit_buffer",
    "cooperative_matrix": "supports_cooperative_matrix",
}


@dataclass(frozen=True)
class GpuProfile:
    """Facts about a GPU that choose and shape kernels; limits that every kernel is checked against.

    threads: of one workgroup at most; threads_xyz: the same per dimension. shared_bytes: shared
    memory of a workgroup. grid: workgroups per dimension. push_bytes: kernel arguments that can be
    pushed; more travel in a block of memory. features: what kernels may use beyond 32-bit types.
    subgroup: threads that run in lock step, for tuning only: no kernel depends on it (0: unknown).
    """

    kind: Literal["vulkan"]
    name: str
    threads: int = 256
    threads_xyz: tuple[int, int, int] = (256, 256, 64)
    shared_bytes: int = 32768
    grid: tuple[int, int, int] = (65535, 65535, 65535)
    push_bytes: int = 128
    features: frozenset[Feature] = frozenset()
    subgroup: int = 32

    family = "gpu"
    mcpu = "x86-64"  # of the host code, which only launches kernels
    isa: ClassVar[Isa] = "portable"

    def tvm_target(self) -> dict[str, Any]:
        """The target as TVM takes it; code of the host is for any x86-64.

        thread_warp_size is 1 whatever the hardware has: TVM drops barriers inside a warp, and a
        subgroup is not one on every device.
        """
        return {
            "kind": self.kind,
            "thread_warp_size": 1,
            "max_threads_per_block": self.threads,
            "max_num_threads": self.threads,
            "max_shared_memory_per_block": self.shared_bytes,
            "max_push_constants_size": self.push_bytes,
            "host": {"kind": "llvm", "mcpu": self.mcpu},
        } | {option: feature in self.features for feature, option in OPTIONS.items()}


TargetProfile = CpuProfile | GpuProfile
