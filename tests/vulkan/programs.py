"""Random programs of copies, fills, kernels, allocations and frees, run on a device and in NumPy.

All numbers are uint32, so that the two must agree in every bit. Called by the tests in processes
of their own, with other environments.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from tests.vulkan.rig import Rig, function, mix, rig

LONGEST = 3000


class Program:
    """Tensors on the device, each with its mirror on the host."""

    def __init__(self, where: Rig, seed: int) -> None:
        self.rig, self.random = where, np.random.default_rng(seed)
        self.tensors: list[Any] = []
        self.mirrors: list[Any] = []

    def run(self, steps: int) -> int:
        """Take random steps; the number of tensors that differ from their mirrors at the end."""
        actions = [self.new, self.drop, self.write, self.fill, self.copy, self.kernel, self.check]
        weights = np.array([2, 1, 1, 2, 3, 6, 0.5])
        self.new()
        self.new()
        for action in self.random.choice(len(actions), steps, p=weights / weights.sum()):
            actions[action]()
        return sum(not self.same(i) for i in range(len(self.tensors)))

    def same(self, i: int) -> bool:
        return bool(np.array_equal(self.rig.memory.get(self.tensors[i]), self.mirrors[i]))

    def pick(self) -> int:
        return int(self.random.integers(len(self.tensors)))

    def values(self, n: int) -> Any:
        return self.random.integers(0, 2**32, n, dtype=np.uint32)

    def span(self, *indices: int) -> tuple[int, ...]:
        """Offsets into tensors and a length that fits all."""
        n = int(self.random.integers(1, min(len(self.mirrors[i]) for i in indices) + 1))
        starts = [int(self.random.integers(len(self.mirrors[i]) - n + 1)) for i in indices]
        return *starts, n

    def new(self) -> None:
        values = self.values(int(self.random.integers(1, LONGEST)))
        self.tensors.append(self.rig.memory.put(values))
        self.mirrors.append(values)

    def drop(self) -> None:
        if len(self.tensors) > 2:  # often while the device still uses it
            i = self.pick()
            del self.tensors[i], self.mirrors[i]

    def write(self) -> None:
        i = self.pick()
        self.mirrors[i] = self.values(len(self.mirrors[i]))
        self.rig.memory.write(self.tensors[i], self.mirrors[i])

    def fill(self) -> None:
        i, value = self.pick(), int(self.values(1)[0])
        start, n = self.span(i)
        function("fill")(self.tensors[i], start * 4, n * 4, value)
        self.mirrors[i][start : start + n] = value

    def copy(self) -> None:
        i, j = self.pick(), self.pick()
        a, b, n = self.span(i, j)
        if i == j and abs(a - b) < n:
            return
        function("copy")(self.tensors[j], b * 4, self.tensors[i], a * 4, n * 4)
        self.mirrors[j][b : b + n] = self.mirrors[i][a : a + n]

    def kernel(self) -> None:
        i, j, k = self.pick(), self.pick(), int(self.values(1)[0])
        n = min(len(self.mirrors[i]), len(self.mirrors[j]))
        self.rig.run(mix(), self.tensors[i], self.tensors[j], k, n)
        x, y = self.mirrors[i][:n], self.mirrors[j][:n]
        self.mirrors[j][:n] = 3 * y + x + np.uint32(k)

    def check(self) -> None:
        assert self.same(self.pick())


def in_threads(programs: list[Program], steps: int) -> list[int]:
    """Run programs at the same time."""
    differing: list[int] = []
    threads = [
        threading.Thread(target=lambda p=p: differing.append(p.run(steps))) for p in programs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return differing


def main(seed: int, steps: int, device: int) -> int:
    """Run one program; 0 if everything agrees and the validation layer has nothing to say."""
    differing = Program(rig(device), seed).run(steps)
    messages = [str(m) for m in function("validation_messages")()]
    sys.stdout.write(f"{differing} tensors differ, {len(messages)} messages\n")
    sys.stdout.write("".join(messages[:3]))
    return differing + len(messages)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
