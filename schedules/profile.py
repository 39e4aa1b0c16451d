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
    code_kind = "cpu"
    captured = False
    rows = 256

    def tvm_target(self) -> dict[str, Any]:
        """The target as TVM takes it."""
        target: dict[str, Any] = {"kind": "llvm", "mcpu": self.mcpu, "mattr": list(self.mattr)}
        return target | ({"mtriple": self.mtriple} if self.mtriple else {})

    @property
    def fma(self) -> bool:
        """Whether fused multiply-add is one instruction (else multiply and add, never a call)."""
        return self.isa != "portable"


GpuKind = Literal["vulkan", "cuda", "metal"]

Platform = Literal["linux", "macos", "ios"]

# The first systems with Metal 2.3, and so with matrices of SIMD groups
OLDEST_MACOS, OLDEST_IOS = "11.0", "14.0"
TRIPLES: dict[Platform, str] = {
    "macos": f"arm64-apple-macos{OLDEST_MACOS}",
    "ios": f"arm64-apple-ios{OLDEST_IOS}",
}

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
    "cooperative_matrix",  # Vulkan
    "tensor_core",  # CUDA: mma.sync of bfloat16 with float32 sums, sm_80 and newer
    "simdgroup_matrix",  # Metal: 8 x 8 matrices of float32, Apple7 and newer
]


# Every desktop GPU has these, and every Vulkan driver since 2020, with one exception: Intel's
# driver for Windows was seen without int64 on Arc in 2022.
DESKTOP: frozenset[Feature] = frozenset(
    {
        "float16",
        "int8",
        "int16",
        "int64",
        "storage8",
        "storage16",
        "subgroup_arithmetic",
        "subgroup_shuffle",
    }
)

# What no Vulkan device has a word for
FOREIGN: frozenset[Feature] = frozenset({"tensor_core", "simdgroup_matrix"})

# Feature -> option of a TVM target for Vulkan; it has no word for subgroup operations
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
    pushed; more travel in a block of memory (Vulkan). features: what kernels may use beyond 32-bit
    types. subgroup: threads that run in lock step, for tuning only, unless a feature says more (0:
    unknown). archs: CUDA architectures to make code for, such as "sm_90a". platform: the system
    that the host's code is for. rows: of one call at most: more of them share one reading of the
    weights, and need more memory for activations. emulated: the device's code is made to run on the
    CPU.
    """

    kind: GpuKind
    name: str
    threads: int = 256
    threads_xyz: tuple[int, int, int] = (256, 256, 64)
    shared_bytes: int = 32768
    grid: tuple[int, int, int] = (65535, 65535, 65535)
    push_bytes: int = 128
    features: frozenset[Feature] = frozenset()
    subgroup: int = 32
    archs: tuple[str, ...] = ()
    platform: Platform = "linux"
    rows: int = 256
    emulated: bool = False

    family = "gpu"
    isa: ClassVar[Isa] = "portable"

    @property
    def code_kind(self) -> str:
        """The kind of the code in a bundle, and of the device that runs it."""
        return f"{self.kind}-emulated" if self.emulated else self.kind

    @property
    def captured(self) -> bool:
        """Whether a decode step is captured as a graph and replayed."""
        return self.kind == "cuda"

    @property
    def mcpu(self) -> str:
        """The processor that the host's code is for; it only launches kernels."""
        return "x86-64" if self.platform == "linux" else "apple-m1"

    def tvm_target(self) -> dict[str, Any]:
        """The target as TVM takes it.

        thread_warp_size is 1 whatever the hardware has: TVM drops barriers inside a warp, and a
        subgroup is not one on every device.
        """
        host = {"kind": "llvm", "mcpu": self.mcpu}
        if self.platform != "linux":
            host["mtriple"] = TRIPLES[self.platform]
        limits = {
            "kind": self.kind,
            "thread_warp_size": 1,
            "max_threads_per_block": self.threads,
            "max_shared_memory_per_block": self.shared_bytes,
            "host": host,
        }
        return limits | _OWN_OPTIONS[self.kind](self)


def _vulkan_options(p: GpuProfile) -> dict[str, Any]:
    options: dict[str, Any] = {option: f in p.features for f, option in OPTIONS.items()}
    return options | {"max_num_threads": p.threads, "max_push_constants_size": p.push_bytes}


def _cuda_options(p: GpuProfile) -> dict[str, Any]:
    """TVM generates the same text for all architectures; the oldest stands for them."""
    return {"arch": p.archs[0] if p.archs else "sm_80"}


def _metal_options(p: GpuProfile) -> dict[str, Any]:
    return {"max_num_threads": p.threads}


_OWN_OPTIONS = {"vulkan": _vulkan_options, "cuda": _cuda_options, "metal": _metal_options}

TargetProfile = CpuProfile | GpuProfile
