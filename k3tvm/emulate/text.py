"""TVM's CUDA or Metal text becomes C++ files that the host's compiler takes.

What the text says stays; only what no C++ compiler knows is written in another way: arrays of the
block become memory that the scheduler hands out, TVM's preamble becomes our header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Language = Literal["cuda", "metal"]

GLOBAL = re.compile(r'^extern "C" __global__ ', re.MULTILINE)
KERNEL = re.compile(r"\bkernel\s+void\s+(\w+)\s*\(")
CUDA_NAME = re.compile(r"(\w+)\s*\(")
SHARED = {
    "cuda": re.compile(
        r"^(\s*)__shared__\s+(?:alignas\(\d+\))?\s*([\w:]+)\s+(\w+)\s*\[([^\]]*)\];", re.MULTILINE
    ),
    "metal": re.compile(
        r"^(\s*)(?:alignas\(\d+\))?\s*threadgroup\s+([\w:]+)\s+(\w+)\s*\[([^\]]*)\];",
        re.MULTILINE,
    ),
}


@dataclass(frozen=True)
class Piece:
    """One kernel's own text."""

    name: str
    text: str


def pieces(language: Language, text: str) -> list[Piece]:
    """The kernels of TVM's text, in its order; declarations and preambles are left out."""
    return _cuda_pieces(text) if language == "cuda" else _metal_pieces(text)


def _cuda_pieces(text: str) -> list[Piece]:
    """From one `extern "C" __global__` to the next; those that end with `;` only declare."""
    starts = [m.start() for m in GLOBAL.finditer(text)]
    found = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        part = text[start:end]
        head = part[: part.index(")")] if "__launch_bounds__" not in part else part
        body = re.sub(r"__launch_bounds__\s*\([^)]*\)", "", head).removeprefix('extern "C" ')
        name = CUDA_NAME.search(body)
        if name and "{" in part:
            found.append(Piece(name[1], part))
    return found


def _metal_pieces(text: str) -> list[Piece]:
    """Each kernel stands in a source of its own."""
    parts = re.split(r"^#include <metal_stdlib>$", text, flags=re.MULTILINE)
    found = []
    for part in parts:
        name = KERNEL.search(part)
        if name:
            body = re.sub(r"^\s*(#include.*|using namespace metal;)$", "", part, flags=re.MULTILINE)
            found.append(Piece(name[1], body))
    return found


def source(language: Language, functions: str, kernel: Piece) -> str:
    """The C++ file of a kernel, with its entry point."""
    body = shared_arrays(language, kernel.text).replace('extern "C" __global__', "static", 1)
    return "\n".join([f'#include "k3emu_{language}.h"', functions, body, _entry(kernel.name)])


def shared_arrays(language: Language, text: str) -> str:
    """Arrays of the block, numbered in the order of the text, as memory of the scheduler."""
    count = 0

    def handed_out(match: re.Match[str]) -> str:
        nonlocal count
        indent, kind, name, size = match.groups()
        number, count = count, count + 1
        return (
            f"{indent}{kind} (&{name})[{size}] = "
            f"*({kind} (*)[{size}])k3emu::shared({number}, sizeof({kind}) * ({size}));"
        )

    return SHARED[language].sub(handed_out, text)


def _entry(name: str) -> str:
    return (
        f'extern "C" __attribute__((visibility("default"))) void k3_entry_{name}'
        f"(void** arguments) {{\n  k3emu::call({name}, arguments);\n}}\n"
    )
