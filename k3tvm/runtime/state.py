"""The state of all sequences: one row (slot) per sequence in every tensor, copied row by row.

A KDA state cannot be cut back to an earlier token, so going back means restoring a snapshot
(specification 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tvm.bundle.manifest import StateEntry
from k3tvm.errors import DeviceError
from k3tvm.runtime.memory import zeros

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Snapshot:
    """The state of one sequence at one position; independent of the engine that made it."""

    position: int
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the snapshot holds."""
        return sum(a.nbytes for a in self.arrays)


class States:
    """State tensors for `slots` sequences of at most `context` tokens."""

    def __init__(self, entries: Sequence[StateEntry], slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        sizes = {"slots": slots, "cap": context}
        shapes = [tuple(d if isinstance(d, int) else sizes[d] for d in e.shape) for e in entries]
        try:
            self.arrays = [zeros(s, e.dtype) for s, e in zip(shapes, entries, strict=True)]
        except (OSError, OverflowError):
            raise DeviceError(
                f"the state of {slots} slots with context {context} does not fit into memory",
                cure="open the bundle with fewer slots or a smaller context",
            ) from None
        self.by_token = ["cap" in e.shape for e in entries]
        self.positions = [0] * slots

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(a.nbytes for a in self.arrays)

    def check(self, slot: int) -> int:
        """The slot, or DeviceError when the engine has no such slot."""
        if not isinstance(slot, (int, np.integer)):
            raise DeviceError(f"slot {slot!r} is not an integer")
        if not 0 <= slot < self.slots:
            raise DeviceError(
                f"slot {slot} does not exist: this engine has {self.slots}",
                cure="open the bundle with more slots",
            )
        return slot

    def reset(self, slot: int) -> None:
        """Begin a new sequence. Cache rows past the position are never read, so they stay."""
        self.positions[self.check(slot)] = 0
        for array, by_token in zip(self.arrays, self.by_token, strict=True):
            if not by_token:
                array[slot] = 0

    def snapshot(self, slot: int) -> Snapshot:
        """Copy the state of a slot."""
        position = self.positions[self.check(slot)]
        rows = [a[slot, :position] if t else a[slot] for a, t in self._pairs()]
        return Snapshot(position, tuple(r.copy() for r in rows))

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Overwrite a slot with a snapshot of this model."""
        self._check_fits(self.check(slot), snapshot)
        for (array, by_token), saved in zip(self._pairs(), snapshot.arrays, strict=True):
            (array[slot, : snapshot.position] if by_token else array[slot])[...] = saved
        self.positions[slot] = snapshot.position

    def fork(self, source: int, target: int) -> None:
        """Make `target` an independent copy of `source`."""
        position = self.positions[self.check(source)]
        self.check(target)
        for array, by_token in self._pairs():
            if by_token:
                array[target, :position] = array[source, :position]
            else:
                array[target] = array[source]
        self.positions[target] = position

    def _pairs(self) -> list[tuple[Array, bool]]:
        return list(zip(self.arrays, self.by_token, strict=True))

    def _check_fits(self, slot: int, snapshot: Snapshot) -> None:
        if snapshot.position > self.context:
            raise DeviceError(
                f"the snapshot has {snapshot.position} tokens, a slot holds {self.context}",
                cure="open the bundle with a larger context",
            )
        shapes = [a[slot, : snapshot.position] if t else a[slot] for a, t in self._pairs()]
        if [s.shape for s in shapes] != [s.shape for s in snapshot.arrays]:
            raise DeviceError("the snapshot is of another model")
