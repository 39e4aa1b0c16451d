"""Refuses kernels that ask for more than a target has, at compile time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from k3tvm.errors import TargetError
from k3tvm.schedules.profile import OPTIONS, GpuProfile
from k3tvm.vulkan.module import KernelInfo


def check_kernel(kernel: KernelInfo, profile: GpuProfile) -> None:
    """Raise TargetError naming the kernel, what it needs and what `profile` has, if too little."""
    for need in needs(kernel, profile):
        raise TargetError(
            need,
            where=f"kernel {kernel.name}",
            cure=f"compile for a target with more than {profile.name} has",
        )


def check_grid(name: str, grid: tuple[int, int, int], profile: GpuProfile) -> None:
    """Raise TargetError if a kernel always launches more workgroups than a dimension has.

    grid: workgroups per dimension, 0 where only the launch knows (the plug-in checks those).
    """
    for axis, size, limit in zip("xyz", grid, profile.grid, strict=True):
        if size > limit:
            raise TargetError(
                f"needs {size} workgroups in {axis}, {profile.name} has {limit}",
                where=f"kernel {name}",
                cure="fold the launch into several dimensions",
            )


def needs(kernel: KernelInfo, profile: GpuProfile) -> Iterator[str]:
    """Every need of a kernel that the target does not meet, as words."""
    threads = math.prod(kernel.local_size)
    if threads > profile.threads:
        yield f"needs {threads} threads in a workgroup, {profile.name} has {profile.threads}"
    for axis, size, limit in zip("xyz", kernel.local_size, profile.threads_xyz, strict=True):
        if size > limit:
            yield f"needs {size} threads in {axis}, {profile.name} has {limit}"
    if kernel.shared_bytes > profile.shared_bytes:
        yield (
            f"needs {kernel.shared_bytes} bytes of shared memory, "
            f"{profile.name} has {profile.shared_bytes}"
        )
    missing = sorted(kernel.features - profile.features)
    if missing:
        yield f"needs {', '.join(missing)}, which {profile.name} lacks"


def profile_of(target: Any) -> GpuProfile:
    """What a TVM target says about a device; the rest is left to the device's own checks."""
    attrs = target.attrs
    options = {option: feature for feature, option in OPTIONS.items()}
    stated = {feature for option, feature in options.items() if bool(attrs.get(option, False))}
    threads = int(attrs.get("max_num_threads", 256))
    return GpuProfile(
        "vulkan",
        "the target",
        threads=threads,
        threads_xyz=(threads, threads, min(threads, 64)),
        grid=(2**31 - 1, 2**31 - 1, 2**31 - 1),
        shared_bytes=int(attrs.get("max_shared_memory_per_block", 16384)),
        push_bytes=int(attrs.get("max_push_constants_size", 128)),
        features=frozenset(stated | {"subgroup_arithmetic", "subgroup_shuffle"}),
    )
