"""What the CPU of this machine can do, and what each level of CPU code needs."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from k3tvm.schedules.profile import Isa

# Names as in the flags of /proc/cpuinfo; all of a level must be there.
NEEDS: dict[Isa, frozenset[str]] = {
    "avx512": frozenset(
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512vbmi", "avx2", "fma"}
    ),
    "avx2": frozenset({"avx2", "fma"}),
    "portable": frozenset(),
}


def cores() -> int:
    """Cores that this process may use; threads that share a core count once."""
    usable = os.sched_getaffinity(0)
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(siblings.format(cpu)).read_text() for cpu in usable})
    except OSError:
        return len(usable)


@cache
def host_features() -> frozenset[str]:
    """The flags of this CPU; on a system without /proc/cpuinfo nothing is known and none given."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def host_isa() -> Isa:
    """The best level that this machine has."""
    return next(isa for isa, needs in NEEDS.items() if needs <= host_features())
