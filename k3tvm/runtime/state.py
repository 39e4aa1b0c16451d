"""The state of all sequences: one row (slot) per sequence in every tensor, copied row by row.

A KDA state cannot be cut back to an earlier token, so going back means restoring a snapshot
(specification 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tvm.bundle.manifest import StateEntry
from k3tvm.errors import DeviceError
from k3tvm.runtime.memory import Block, Memory

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


@dataclass(frozen=True)
class State:
    """One state tensor: its block, the shape of a slot, and whether a slot grows by token."""

    block: Block
    shape: tuple[int, ...]
    by_token: bool

    def saved_shape(self, position: int) -> tuple[int, ...]:
        """What must be kept of a slot that has read `position` tokens."""
        return (position, *self.shape[1:]) if self.by_token else self.shape

    def begin(self, slot: int) -> int:
        """The first element of a slot."""
        return slot * math.prod(self.shape)


def state_bytes(entries: Sequence[StateEntry], slots: int, context: int) -> int:
    """Bytes of all state tensors of an engine."""
    return sum(math.prod(_shape(e, slots, context)) * np.dtype(e.dtype).itemsize for e in entries)


def _shape(entry: StateEntry, slots: int, context: int) -> tuple[int, ...]:
    sizes = {"slots": slots, "cap": context}
    return tuple(d if isinstance(d, int) else sizes[d] for d in entry.shape)


class States:
    """State tensors for `slots` sequences of at most `context` tokens."""

    def __init__(
        self, entries: Sequence[StateEntry], slots: int, context: int, memory: Memory
    ) -> None:
        self.slots, self.context = slots, context
        try:
            self.all = [self._state(e, memory) for e in entries]
        except (OSError, OverflowError):
            raise DeviceError(
                f"the state of {slots} slots with context {context} does not fit into memory",
                cure="open the bundle with fewer slots or a smaller context",
            ) from None
        self.positions = [0] * slots

    def _state(self, entry: StateEntry, memory: Memory) -> State:
        shape = _shape(entry, self.slots, self.context)
        return State(memory.block(shape, entry.dtype), shape[1:], "cap" in entry.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(s.block.nbytes for s in self.all)

    def check(self, slot: int) -> int:
        """The slot, or DeviceError when the engine has no such slot."""
        if not isinstance(slot, (int, np.integer)):
            raise DeviceError(f"slot {slot!r} is not an integer")
        if not 0 <= slot < self.slots:
            raise DeviceError(
                f"slot {slot} does not exist: this engine has {self.slots}",
                cure="open the bundle with more slots",
            )
        return int(slot)

    def reset(self, slot: int) -> None:
        """Begin a new sequence. Cache rows past the position are never read, so they stay."""
        self.positions[self.check(slot)] = 0
        for state in self.all:
            if not state.by_token:
                state.block.clear(state.begin(slot), math.prod(state.shape))

    def snapshot(self, slot: int) -> Snapshot:
        """Copy the state of a slot."""
        position = self.positions[self.check(slot)]
        return Snapshot(position, tuple(self._saved(slot, position)))

    def _saved(self, slot: int, position: int) -> Iterator[Array]:
        for state in self.all:
            shape = state.saved_shape(position)
            yield state.block.read(state.begin(slot), math.prod(shape)).reshape(shape)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Overwrite a slot with a snapshot of this model."""
        self.check(slot)
        self._check_fits(snapshot)
        for state, saved in zip(self.all, snapshot.arrays, strict=True):
            state.block.write(state.begin(slot), saved)
        self.positions[slot] = snapshot.position

    def fork(self, source: int, target: int) -> None:
        """Make `target` an independent copy of `source`."""
        position = self.positions[self.check(source)]
        self.check(target)
        for state in self.all:
            count = math.prod(state.saved_shape(position))
            state.block.copy(state.begin(source), state.begin(target), count)
        self.positions[target] = position

    def _check_fits(self, snapshot: Snapshot) -> None:
        if snapshot.position > self.context:
            raise DeviceError(
                f"the snapshot has {snapshot.position} tokens, a slot holds {self.context}",
                cure="open the bundle with a larger context",
            )
        shapes = [s.saved_shape(snapshot.position) for s in self.all]
        if shapes != [a.shape for a in snapshot.arrays]:
            raise DeviceError("the snapshot is of another model")
