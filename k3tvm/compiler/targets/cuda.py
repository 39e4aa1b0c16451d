"""CUDA targets: a list of architectures into the facts that all of them share.

The limits are those of the CUDA C++ Programming Guide's table of compute capabilities for 8.0 and
newer: 1024 threads, 48 KiB of shared memory without asking for more, warps of 32.
"""

from __future__ import annotations

import re

from k3tvm.errors import TargetError
from k3tvm.schedules.profile import DESKTOP, Feature, GpuProfile

# Ampere (A100; RTX 30), Ada (RTX 40), Hopper, Blackwell (B200; RTX 50)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
OLDEST_OF_ITS_OWN = 90  # "sm_90a": with code that later ones do not run
OLDEST = 80  # mma.sync of bfloat16 and asynchronous copies begin here

FEATURES: frozenset[Feature] = DESKTOP | {"float64", "tensor_core"}


def cuda_profile(variant: str = "", emulated: bool = False) -> GpuProfile:
    """`""`: the architectures of `ARCHS`; else a list such as "sm_86" or "sm_80+sm_90a"."""
    archs = tuple(dict.fromkeys(re.split(r"[+,]", variant))) if variant else ARCHS
    kind = "cuda-emulated" if emulated else "cuda"
    for arch in archs:
        _check(f"target {kind}:{variant}", arch)
    return GpuProfile(
        "cuda",
        f"{kind}:{'+'.join(archs)}" if variant else kind,
        threads=1024,
        threads_xyz=(1024, 1024, 64),
        shared_bytes=49152,
        grid=(2**31 - 1, 65535, 65535),
        features=FEATURES,
        subgroup=32,
        archs=archs,
        rows=1024,
        emulated=emulated,
    )


def cuda_emulated_profile(variant: str = "") -> GpuProfile:
    """The same code, made to run on the CPU."""
    return cuda_profile(variant, emulated=True)


def _check(where: str, arch: str) -> None:
    match = re.fullmatch(r"sm_(\d{2,3})(a?)", arch)
    if not match or match[2] and int(match[1]) < OLDEST_OF_ITS_OWN:
        raise TargetError(
            f"{arch!r} is not an architecture",
            where=where,
            cure=f"name some, such as cuda:sm_86 or cuda:sm_80+sm_90a; known: {', '.join(ARCHS)}",
        )
    if int(match[1]) < OLDEST:
        raise TargetError(
            f"{arch} has no tensor cores for bfloat16",
            where=where,
            cure=f"use sm_{OLDEST} or newer, or --target vulkan",
        )
