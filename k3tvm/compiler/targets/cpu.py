"""CPU targets: the vector instructions of this machine, or a named level below them."""

from __future__ import annotations

from k3tvm.errors import TargetError
from k3tvm.runtime.cpu import NEEDS, cores, host_isa
from k3tvm.schedules.profile import CpuProfile, Isa

MCPU: dict[Isa, str] = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "portable": "x86-64"}
MATTR: dict[Isa, tuple[str, ...]] = {"avx512": ("+avx512vnni", "+avx512vbmi")}  # beyond v4
MANY = 64  # parts of grouped work on a machine whose cores are not known


def cpu_profile(variant: str = "") -> CpuProfile:
    """`""`: this machine; else one of avx512, avx2, portable (which need not be this machine's)."""
    if variant and variant not in NEEDS:
        raise TargetError(f"target cpu:{variant}: not known; choose one of: {', '.join(NEEDS)}")
    isa = next((i for i in NEEDS if i == variant), None) or host_isa()
    tasks = MANY if variant else 2 * cores()
    mattr = MATTR.get(isa, ())
    return CpuProfile("cpu", f"cpu:{isa}", MCPU[isa], isa, mattr=mattr, tasks=tasks)
