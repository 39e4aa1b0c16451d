"""Vulkan targets: a name into the facts that every device of that name shares.

A profile is a promise in both directions: kernels use nothing beyond it, and a device that offers
at least as much runs them. Where drivers for the same hardware differ, the smaller number stands.
Numbers are what drivers report through vkGetPhysicalDeviceProperties2 and ...Features2, read from
public vulkaninfo reports and from the sources of the open drivers; those of lavapipe were measured.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast, get_args

from k3tvm.errors import TargetError
from k3tvm.schedules.profile import DESKTOP, FOREIGN, Feature, GpuProfile
from k3tvm.vulkan.devices import Device, find

VULKAN = tuple(f for f in get_args(Feature) if f not in FOREIGN)
BASELINE = "baseline"
FROM_DEVICE = "from-device"
WIDEST_PUSH = 256  # what vendors of desktop GPUs offer at most; no kernel needs more

PROFILES = {
    # What NVIDIA, AMD, Intel, Apple and lavapipe have in common. 256 threads are enough to fill
    # all of them; 32 KiB is what AMD's and Intel's drivers for Windows offer.
    BASELINE: GpuProfile("vulkan", "vulkan-baseline", features=DESKTOP),
    # Mesa 22.3 and 25.0: 8 lanes, 128 bytes (22.3) or 256 (25.0) of push constants.
    "lavapipe": GpuProfile(
        "vulkan",
        "vulkan-lavapipe",
        threads=1024,
        threads_xyz=(1024, 1024, 1024),
        features=DESKTOP | {"float64"},
        subgroup=8,
    ),
    # Turing and newer; NVIDIA's driver, and NVK from the version with 256 bytes of push constants.
    "nvidia": GpuProfile(
        "vulkan",
        "vulkan-nvidia",
        threads=1024,
        threads_xyz=(1024, 1024, 64),
        shared_bytes=49152,
        grid=(2**31 - 1, 65535, 65535),
        push_bytes=256,
        features=DESKTOP | {"float64"},
        subgroup=32,
    ),
    # RDNA and newer. RADV offers 64 KiB, the driver for Windows 32 KiB; older versions of both
    # 128 bytes of push constants. Both run compute with 64 lanes unless told otherwise.
    "amd": GpuProfile(
        "vulkan",
        "vulkan-amd",
        threads=1024,
        threads_xyz=(1024, 1024, 1024),
        features=DESKTOP | {"float64"},
        subgroup=64,
    ),
    # Xe and Arc. Mesa offers 64 KiB or 48 KiB, the driver for Windows 32 KiB on integrated GPUs.
    # Arc has no float64. Lanes vary from 8 to 32 by kernel; both drivers report 32.
    "intel": GpuProfile(
        "vulkan",
        "vulkan-intel",
        threads=1024,
        threads_xyz=(1024, 1024, 64),
        features=DESKTOP,
        subgroup=32,
    ),
    # Apple silicon through MoltenVK, which needs macOS 13 for device addresses. Metal has no
    # float64; MoltenVK sets no limit to the grid and passes 4096 bytes of push constants.
    "apple": GpuProfile(
        "vulkan",
        "vulkan-apple",
        threads=1024,
        threads_xyz=(1024, 1024, 1024),
        push_bytes=WIDEST_PUSH,
        features=DESKTOP,
        subgroup=32,
    ),
    # Adreno 7xx and Mali Valhall with drivers of Android 13. Mali has 512 threads and 16 lanes,
    # Adreno 1024 and 64; shuffles and int64 are not on all of them; 16 KiB is what Vulkan promises.
    "mobile": GpuProfile(
        "vulkan",
        "vulkan-mobile",
        shared_bytes=16384,
        features=DESKTOP - {"int64", "subgroup_shuffle"},
        subgroup=16,
    ),
}


def vulkan_profile(variant: str = "") -> GpuProfile:
    """The profile of `NAME`, `from-device` or `from-device:N`, each with `+FEATURE` any times.

    "" is `baseline`. N selects a device of this machine, see `devices.find`; the first usable one
    without it. Raises TargetError for an unknown name, DeviceError for a device that is not there.
    """
    name, *extra = variant.split("+")
    profile = _named(name or BASELINE)
    return _with(profile, extra) if extra else profile


def _named(name: str) -> GpuProfile:
    if name in PROFILES:
        return PROFILES[name]
    kind, _, selector = name.partition(":")
    if kind == FROM_DEVICE:
        return profile_of_device(find(selector))
    choices = ", ".join((*PROFILES, f"{FROM_DEVICE}[:N]"))
    raise TargetError(f"target vulkan:{name}: not known; choose one of: {choices}")


def profile_of_device(device: Device) -> GpuProfile:
    """What a device reports.

    Cooperative matrices are left out: their kernels are asked for by name, as long as none of them
    has run on hardware.
    """
    words = re.findall(r"[a-z0-9]+", device.name.lower())
    return GpuProfile(
        "vulkan",
        f"vulkan-{'-'.join(words)[:40].rstrip('-')}",
        threads=device.threads,
        threads_xyz=device.threads_xyz,
        shared_bytes=device.shared_bytes,
        grid=device.grid,
        push_bytes=min(device.push_bytes, WIDEST_PUSH),
        features=_known(device.features) - {"cooperative_matrix"},
        subgroup=device.subgroup,
    )


def _known(names: frozenset[str]) -> frozenset[Feature]:
    return frozenset(cast(Feature, n) for n in names if n in VULKAN)


def _with(profile: GpuProfile, extra: list[str]) -> GpuProfile:
    """The profile with more features, which stand in its name."""
    known = VULKAN
    for name in extra:
        if name not in known:
            raise TargetError(
                f"target {profile.name}: feature {name!r} is not known; choose among: "
                f"{', '.join(known)}"
            )
    return replace(
        profile,
        name="+".join((profile.name, *extra)),
        features=profile.features | _known(frozenset(extra)),
    )
