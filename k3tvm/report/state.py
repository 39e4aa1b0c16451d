"""Where a walk through a kernel stands: open loops and conditions, integers in memory, findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3tvm.report.domain import Domain
from k3tvm.report.values import UNKNOWN, Known, combine, is_known


@dataclass
class Tensor:
    """Device memory. shape in numbers; bytes of an element; data: of integers that are followed.

    lost: those are not known any more.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    data: np.ndarray | None = None
    real: bool = True
    lost: bool = False


@dataclass(frozen=True)
class Access:
    """A load or store of `lanes` elements. index: None where it is not known."""

    tensor: Tensor
    written: bool
    lanes: int
    index: tuple[Known, ...] | None
    domain: Domain


@dataclass
class Launch:
    """One launch: its grid as text and in numbers, the threads, and what happens in it.

    number: among all launches of the kernel, those that are not reached counted, too.
    operations: how many of each kind a thread does where, by kind and place. notes: what could not
    be followed.
    """

    number: int
    grid_text: list[str] = field(default_factory=list)
    grid: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    operations: list[tuple[Domain, dict[str, int]]] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)


@dataclass
class Cell:
    """Integers of a thread, by constant index; `axes` and `conditions` are those at its birth."""

    conditions: int
    values: dict[int, Any] = field(default_factory=dict)
    lost: bool = False


@dataclass
class Shared:
    """Integers of a workgroup: an array [workgroups..., elements], None when lost."""

    size: int
    values: np.ndarray | None = None
    lost: bool = False


class State:
    """All of that, while a kernel is walked through."""

    def __init__(self, variables: dict[Any, Any], tensors: dict[Any, Tensor]) -> None:
        self.variables = variables
        self.tensors = tensors
        self.cells: dict[Any, Cell] = {}
        self.shared: dict[Any, Shared] = {}
        self.launches: list[Launch] = []
        self.skipped = 0  # launches that are not reached
        self.extents: list[int] = []
        self.conditions: list[Any] = []
        self.blocks = 0  # of the axes, those of workgroups
        self.thread: Any = 0  # threadIdx.x, of so many
        self.threads = 1
        self._domain: Domain | None = None

    @property
    def launch(self) -> Launch | None:
        """The launch that is open."""
        return self.launches[-1] if self.extents else None

    def domain(self) -> Domain:
        """Where the walk is."""
        if self._domain is None:
            known = tuple(np.asarray(c) for c in self.conditions if is_known(c))
            self._domain = Domain(
                tuple(self.extents), known, exact=len(known) == len(self.conditions)
            )
        return self._domain

    @contextmanager
    def axis(self, extent: int) -> Iterator[np.ndarray]:
        """A workgroup, thread or loop index 0 <= i < extent, along an axis of its own."""
        self.extents.append(extent)
        self._domain = None
        yield np.arange(extent).reshape((1,) * (len(self.extents) - 1) + (extent,))
        self.extents.pop()
        self._domain = None

    @contextmanager
    def where(self, conditions: Sequence[Any]) -> Iterator[None]:
        """Inside, only where the conditions hold."""
        before = len(self.conditions)
        self.conditions += conditions
        self._domain = None
        yield
        del self.conditions[before:]
        self._domain = None

    def access(self, tensor: Tensor, written: bool, lanes: int, index: Sequence[Any]) -> None:
        """Note a load or store."""
        if self.launch is None:
            return
        known = tuple(index) if all(is_known(i) for i in index) else None
        self.launch.accesses.append(Access(tensor, written, lanes, known, self.domain()))

    def count(self, kind: str, amount: int) -> None:
        """Note operations of a thread."""
        if self.launch is None:
            return
        done = self.launch.operations
        if not done or done[-1][0] is not self.domain():
            done.append((self.domain(), {}))
        counts = done[-1][1]
        counts[kind] = counts.get(kind, 0) + amount

    def note(self, text: str) -> None:
        """Note what is not followed."""
        if self.launch is not None:
            self.launch.notes.add(text)

    def read_cell(self, cell: Cell, index: Any) -> Any:
        """An integer of a thread."""
        if cell.lost or not isinstance(index, int):
            return UNKNOWN
        return cell.values.get(index, UNKNOWN)

    def write_cell(self, cell: Cell, index: Any, value: Any) -> None:
        """Change it where the conditions hold that came after its birth."""
        if cell.lost:
            return
        if not isinstance(index, int):
            cell.values.clear()
            return
        old = cell.values.get(index)
        for condition in self.conditions[cell.conditions :]:
            if old is not None:
                value = combine(np.where, condition, value, old)
        cell.values[index] = value

    def read_shared(self, shared: Shared, index: Any) -> Any:
        """An integer of the workgroup."""
        if shared.lost or shared.values is None or not is_known(index):
            return UNKNOWN
        blocks = [np.arange(e).reshape((1,) * i + (e,)) for i, e in enumerate(self._grid())]
        values = shared.values

        def gather(at: Any, *where: Any) -> Any:
            return values[(*where, np.clip(at, 0, shared.size - 1))]

        return combine(gather, index, *blocks)

    def write_shared(self, shared: Shared, index: Any, value: Any) -> None:
        """Change it; what is not known spoils all."""
        needed = [index, value, *self.conditions]
        if shared.lost or not all(is_known(v) for v in needed):
            shared.lost = True
            return
        if shared.values is None:
            shared.values = np.zeros((*self._grid(), shared.size), np.int64)
        blocks = [np.arange(e).reshape((1,) * i + (e,)) for i, e in enumerate(self._grid())]
        target = shared.values

        def scatter(at: Any, new: Any, *rest: Any) -> Any:
            axes, limits = rest[: self.blocks], rest[self.blocks :]
            place, new, *where, mask = np.broadcast_arrays(at, new, *axes, _both(limits))
            target[(*(a[mask] for a in where), np.clip(place, 0, shared.size - 1)[mask])] = new[
                mask
            ]
            return at

        if not is_known(combine(scatter, index, value, *blocks, *self.conditions)):
            shared.lost = True

    def write_data(self, tensor: Tensor, index: Sequence[Any], value: Any) -> None:
        """Change integers in device memory; what is not known spoils all."""
        count = len(index)
        data = tensor.data

        def scatter(*given: Any) -> Any:
            *places, new, mask = np.broadcast_arrays(*given[: count + 1], _both(given[count + 1 :]))
            at = (np.clip(p, 0, n - 1)[mask] for p, n in zip(places, tensor.shape, strict=True))
            if data is not None:
                data[tuple(at)] = new[mask]
            return new

        needed = [*index, value, *self.conditions]
        tensor.lost |= not all(is_known(v) for v in needed)
        tensor.lost = tensor.lost or not is_known(combine(scatter, *needed))

    def _grid(self) -> list[int]:
        return self.extents[: self.blocks]


def _both(conditions: Sequence[Any]) -> Any:
    """Where all of the conditions hold."""
    mask = np.ones((), bool)
    for condition in conditions:
        mask = mask & condition
    return mask
