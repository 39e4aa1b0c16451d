"""Target names into target profiles; one file per target."""

from __future__ import annotations

from k3tvm.compiler.targets.cpu import cpu_profile
from k3tvm.errors import TargetError
from k3tvm.schedules.profile import TargetProfile

TARGETS = {"cpu": cpu_profile}


def profile_of(target: str) -> TargetProfile:
    """The profile of `KIND[:VARIANT]`, e.g. "cpu", "cpu:portable"; TargetError if there is none."""
    kind, _, variant = target.partition(":")
    if kind not in TARGETS:
        raise TargetError(f"target {target!r}: not known; choose one of: {', '.join(TARGETS)}")
    return TARGETS[kind](variant)
