"""Target names into target profiles; one file per target."""

from __future__ import annotations

import re
from collections.abc import Callable

from k3tvm.compiler.targets.cpu import cpu_profile
from k3tvm.compiler.targets.cuda import cuda_emulated_profile, cuda_profile
from k3tvm.compiler.targets.metal import metal_emulated_profile, metal_profile
from k3tvm.compiler.targets.vulkan import vulkan_profile
from k3tvm.errors import TargetError
from k3tvm.schedules.profile import TargetProfile

TARGETS: dict[str, Callable[[str], TargetProfile]] = {
    "cpu": cpu_profile,
    "vulkan": vulkan_profile,
    "cuda": cuda_profile,
    "metal": metal_profile,
    "cuda-emulated": cuda_emulated_profile,
    "metal-emulated": metal_emulated_profile,
}


def profile_of(target: str) -> TargetProfile:
    """The profile of `KIND[:VARIANT]`, e.g. "cpu", "cpu:portable", "vulkan:nvidia".

    A profile's own name, such as "vulkan-nvidia", is understood too. TargetError if there is none.
    """
    match = re.fullmatch(r"([a-z]*(?:-emulated)?)([:-]?)(.*)", target, re.DOTALL)
    kind, separator, variant = match.groups() if match else ("", "", "")
    if kind not in TARGETS:
        raise TargetError(f"target {target!r}: not known; choose one of: {', '.join(TARGETS)}")
    if separator and not variant or variant.endswith(":"):
        raise TargetError(f"target {target!r}: nothing stands after {target[-1]!r}")
    return TARGETS[kind](variant)


def split_targets(text: str) -> list[str]:
    """Names with commas between them; a list of architectures may have commas, too."""
    return [name.strip() for name in re.split(r",(?!\s*sm_)", text)]
