"""Puts our device functions in front of the CUDA code that calls them.

They stand in the files of the folder `device`; a file is taken when the code, or a file that was
taken, calls a function of it. A function has two bodies where it holds PTX: the other one is for
emulation, where K3_EMULATED is defined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k3tvm.errors import TargetError

FOLDER = Path(__file__).parent / "device"
DEFINITION = re.compile(r"__device__\s+__forceinline__\s+[\w\s*&]+?\b(k3_[\w#]+)\s*\(")
CALL = re.compile(r"\b(k3_\w+)\s*\(")
PASTED = re.compile(r"##\w+?##|##\w+")  # what a macro puts into a name


@dataclass(frozen=True)
class Functions:
    """A file of device functions: its name, its text, the functions that it defines.

    patterns: names that its macros put together.
    """

    name: str
    text: str
    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def calls(self) -> set[str]:
        """Names that it calls and does not define itself."""
        return {n for n in CALL.findall(self.text) if n not in self.names and not self.makes(n)}

    def makes(self, name: str) -> bool:
        """Whether one of its macros can define the function."""
        return any(p.fullmatch(name) for p in self.patterns)


@cache
def files() -> tuple[Functions, ...]:
    """All files, by name."""
    return tuple(_read(path) for path in sorted(FOLDER.glob("*.cuh")))


def device_functions(text: str) -> str:
    """The functions that a text calls, "" for none; TargetError for a call of an unknown one."""
    return "".join(f"{f.text}\n" for f in _needed(set(CALL.findall(text)), []))


def _needed(names: set[str], begun: list[Functions]) -> Iterator[Functions]:
    """The files that define `names`, each behind those that it calls itself."""
    for name in sorted(names):
        owner = _owner(name)
        if owner not in begun:
            begun.append(owner)
            yield from _needed(owner.calls(), begun)
            yield owner


def _owner(name: str) -> Functions:
    found = [f for f in files() if name in f.names] or [f for f in files() if f.makes(name)]
    if not found:
        raise TargetError(f"no file in {FOLDER.name}/ defines {name}", where="CUDA code")
    return found[0]


def _read(path: Path) -> Functions:
    text = path.read_text()
    names = set(DEFINITION.findall(text))
    plain = frozenset(n for n in names if "#" not in n)
    made = [PASTED.sub(r"\\w+", name) for name in sorted(names - plain)]
    return Functions(path.name, text, plain, tuple(re.compile(m) for m in made))
