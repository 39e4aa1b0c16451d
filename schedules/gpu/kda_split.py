"""Turns the size of a KDA state into a layout over the registers of GPU workgroups."""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.relax_models.operators import KdaChunk, KdaStep
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal

REGISTERS = 64  # state values of a thread; with them it stays below 128 registers


@dataclass(frozen=True)
class Split:
    """How a state [key_dim, value_dim] lies in the registers of a workgroup.

    lanes: neighbouring columns of a thread. columns: threads side by side. bands: threads that
    share the columns. rows: rows of a thread. tiles: workgroups that share the head.
    """

    lanes: int
    columns: int
    bands: int
    rows: int
    tiles: int

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.columns * self.bands

    @property
    def width(self) -> int:
        """Columns of a workgroup."""
        return self.columns * self.lanes


def power_above(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def split_of(op: KdaStep | KdaChunk, p: GpuProfile) -> Split:
    """The widest tile of columns whose state fits the registers; Refusal when none does."""
    lanes = 4 if op.value_dim % 4 == 0 else 1
    most = min(256, p.threads)
    columns = min(power_above(-(-op.value_dim // lanes)), 128 // lanes, most)
    while columns:
        bands = min(most // columns, power_above(op.key_dim))
        rows = -(-op.key_dim // bands)
        if rows * lanes <= REGISTERS:
            tiles = -(-op.value_dim // (columns * lanes))
            return Split(lanes, columns, bands, rows, tiles)
        columns //= 2
    raise Refusal(f"key_dim {op.key_dim}: a column must fit {REGISTERS * most // lanes} registers")
