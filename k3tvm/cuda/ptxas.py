"""What ptxas says about kernels becomes numbers: registers, stack, spills, shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from k3tvm.bundle.kernels import Resources

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
PROPERTIES = re.compile(
    r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores,"
    r" (\d+) bytes spill loads"
)
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def resources(text: str) -> dict[str, Resources]:
    """Resources by kernel, from what `ptxas -v` printed for one architecture.

    ValueError when a part of it is missing: another version may say it in other words.
    """
    return dict(_resources(text))


def _resources(text: str) -> Iterator[tuple[str, Resources]]:
    entries = list(ENTRY.finditer(text))
    ends = [e.start() for e in entries[1:]] + [len(text)]
    for entry, end in zip(entries, ends, strict=True):
        name, arch = entry.groups()
        said = text[entry.end() : end]
        frame = next((m for m in PROPERTIES.finditer(said) if m[1] == name), None)
        used, shared = USED.search(said), SHARED.search(said)
        if frame is None or used is None:
            raise ValueError(f"ptxas does not tell the registers of {name}")
        stack, stores, loads = (int(n) for n in frame.groups()[1:])
        shared_bytes = int(shared[1]) if shared else 0
        yield name, Resources(arch, int(used[1]), stack, stores, loads, shared_bytes)
