"""How many warps of a kernel a multiprocessor can hold, and what stops it from holding more.

The numbers of the table are those of the CUDA C++ Programming Guide, section "Compute
capabilities". Registers are given to warps in units of 256, warps to the four partitions of a
multiprocessor in turn; each block takes 1 KiB of shared memory for the system.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WARP = 32
REGISTERS, REGISTER_UNIT, PARTITIONS = 65536, 256, 4
RESERVED, SHARED_UNIT = 1024, 128  # bytes

Limit = Literal["warps", "blocks", "registers", "shared memory"]


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor holds: warps, blocks, bytes of shared memory for all blocks."""

    warps: int
    blocks: int
    shared_bytes: int


# By compute capability
MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024),
    87: Multiprocessor(48, 16, 164 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024),
    100: Multiprocessor(64, 32, 228 * 1024),
    103: Multiprocessor(64, 32, 228 * 1024),
    110: Multiprocessor(48, 24, 228 * 1024),
    120: Multiprocessor(48, 24, 100 * 1024),
    121: Multiprocessor(48, 24, 100 * 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that fit, the share of the warps that could, and what is used up first."""

    blocks: int
    warps: int
    share: float
    limit: Limit


def occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> Occupancy | None:
    """The theoretical occupancy of a kernel on "sm_90a"; None if that is not in the table.

    threads, shared_bytes: of a block; registers: of a thread.
    """
    sm = MULTIPROCESSORS.get(int("".join(c for c in arch if c.isdigit())))
    if sm is None:
        return None
    warps = -(-threads // WARP)
    fits: dict[Limit, int] = {
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
        "registers": _by_registers(warps, registers),
        "shared memory": sm.shared_bytes // _rounded(shared_bytes + RESERVED, SHARED_UNIT),
    }
    limit = min(fits, key=lambda name: fits[name])
    blocks = fits[limit]
    return Occupancy(blocks, blocks * warps, blocks * warps / sm.warps, limit)


def _by_registers(warps: int, registers: int) -> int:
    """Blocks whose registers fit."""
    if registers == 0:
        return REGISTERS
    of_warp = _rounded(registers * WARP, REGISTER_UNIT)
    if of_warp * _rounded(warps, PARTITIONS) > REGISTERS:
        return 0  # not even one: a launch counts every partition as full
    in_partition = REGISTERS // PARTITIONS // of_warp
    return in_partition * PARTITIONS // warps


def _rounded(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
