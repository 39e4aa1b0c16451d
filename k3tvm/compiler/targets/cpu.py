"""CPU targets: the vector instructions of this machine, or a named level below them."""

from __future__ import annotations

import os
from functools import cache

from k3tvm.errors import TargetError
from k3tvm.schedules.profile import Isa, TargetProfile

# LLVM feature names that kernels of a level use; all must be there.
NEEDS: dict[Isa, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"}),
    "avx2": frozenset({"avx2", "fma"}),
    "portable": frozenset(),
}
MCPU: dict[Isa, str] = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "portable": "x86-64"}


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the features of the CPU that this process runs on."""
    from k3tvm._tvm import tvm

    features = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return frozenset(str(name) for name, present in features.items() if present)


def host_isa() -> Isa:
    """The best level that this machine has."""
    return next(isa for isa, needs in NEEDS.items() if needs <= host_features())


def cpu_profile(variant: str = "") -> TargetProfile:
    """`""`: this machine; else one of avx512, avx2, portable (which need not be this machine's)."""
    if variant and variant not in NEEDS:
        raise TargetError(f"target cpu:{variant}: not known; choose one of: {', '.join(NEEDS)}")
    isa = next((i for i in NEEDS if i == variant), None) or host_isa()
    tasks = 8 * (os.cpu_count() or 1)
    return TargetProfile("cpu", f"cpu:{isa}", MCPU[isa], isa, tasks=tasks)
