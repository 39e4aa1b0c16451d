"""Metal targets: a family of Apple's GPUs into the facts that its members share.

The limits are those of Apple's Metal Feature Set Tables: 1024 threads, 32 KiB of threadgroup memory
and SIMD groups of 32 from Apple7 (M1, A14) on, which is also where matrices of SIMD groups begin.
"""

from __future__ import annotations

from k3tvm.errors import TargetError
from k3tvm.schedules.profile import DESKTOP, Feature, GpuProfile, Platform

FAMILIES = {"apple7": "M1, A14", "apple8": "M2, A15, A16", "apple9": "M3, M4, A17 Pro"}
OLDEST = "apple7"
PLATFORMS: dict[str, Platform] = {"macos": "macos", "ios": "ios"}

FEATURES: frozenset[Feature] = DESKTOP | {"simdgroup_matrix"}


def metal_profile(variant: str = "", emulated: bool = False) -> GpuProfile:
    """`FAMILY`, `ios` or `FAMILY+ios`; "" is the oldest family on macOS."""
    family, _, platform = variant.partition("+")
    if family in PLATFORMS:
        family, platform = OLDEST, platform or family
    family, platform = family or OLDEST, platform or "macos"
    if family not in FAMILIES or platform not in PLATFORMS:
        raise TargetError(
            f"target metal:{variant}: not known",
            cure=f"choose one of: {', '.join(FAMILIES)}, each with +ios or without",
        )
    kind = "metal-emulated" if emulated else "metal"
    return GpuProfile(
        "metal",
        f"{kind}:{variant}" if variant else kind,
        threads=1024,
        threads_xyz=(1024, 1024, 1024),
        grid=(2**31 - 1, 2**31 - 1, 2**31 - 1),
        features=FEATURES,
        subgroup=32,
        platform="linux" if emulated else PLATFORMS[platform],
        rows=512,
        emulated=emulated,
    )


def metal_emulated_profile(variant: str = "") -> GpuProfile:
    """The same code, made to run on the CPU."""
    return metal_profile(variant, emulated=True)
