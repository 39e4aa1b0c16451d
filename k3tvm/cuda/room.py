"""PTX of kernels that spill becomes PTX that leaves them more registers.

ptxas would have many warps at once, and for their sake may give a thread fewer registers than it
needs, though a multiprocessor has more. Told that one workgroup at a time is enough, it does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection

ROOM = ".minnctapersm 1"


def with_room(ptx: str, names: Collection[str]) -> str:
    """The same PTX in which kernels of these names ask for no more than one workgroup at a time."""

    def widened(entry: re.Match[str]) -> str:
        head, name, directives = entry.groups()
        if name not in names:
            return entry[0]
        kept = [line for line in directives.splitlines() if ".minnctapersm" not in line]
        return "\n".join([head, *(line for line in kept if line.strip()), f"{ROOM}\n"])

    return re.sub(r"(\.entry (\w+)\([^)]*\))([^{]*)(?=\{)", widened, ptx)
