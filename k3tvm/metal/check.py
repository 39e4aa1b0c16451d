"""Metal source is checked with clang, against declarations of the Metal library of our own.

Apple's compiler runs on Apple's systems only. This check finds what another machine can: types,
names, address spaces, sizes of casts. It knows nothing of Apple's limits, and accepts what clang
accepts beyond the Metal language, but for what `_by_rule` lists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache as once
from pathlib import Path

from k3tvm.compiler import cache
from k3tvm.errors import TargetError
from k3tvm.metal.zig import find_zig, run, version

CACHE = "metal-checked"
INCLUDE = Path(__file__).resolve().parent / "include"
# Declared here is all that a kernel may call: no library of C or C++, no builtins of clang.
FLAGS = (
    *("-x", "c++", "-std=c++17", "-fsyntax-only", "--target=arm64-apple-macos13"),
    *("-nostdinc", "-ffreestanding", "-fno-builtin", "-ferror-limit=1", "-w"),
    "-flax-vector-conversions=none",
    f"-I{INCLUDE}",
)
# Arguments of a kernel, and what TVM's runtime fills in
ATTRIBUTES = {
    "buffer",
    "max_total_threads_per_threadgroup",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
}
BUFFERS = 31  # entries of the table of buffers of a function, all families
ARGUMENT_BYTES = 4096  # of what a call can pass by value
THREADGROUP = re.compile(r"^( *)(alignas\(16\) )?threadgroup (\w+ \w+\[\d+\];)", re.M)
# A pointer without an address space: declared, or cast to
POINTER = re.compile(r"(?:^ *|\()(?:const )?(?:bool|half|float|u?(?:char|short|int|long))[234]?\*")
# The address space of a parameter or array, and of a pointer that is made of one
SPACE = re.compile(r"\b(device|threadgroup|thread) \w+\*? (\w+)(?:\[\d+\];| \[\[ buffer)")
CAST = re.compile(r"\((device|threadgroup|thread) \w+\*\)\((\w+)\b")


def check_kernels(texts: Mapping[str, str]) -> None:
    """Check sources by kernel name; TargetError with the first fault, its kernel and its line."""
    for name, text in texts.items():
        for line, fault in _by_rule(text):
            raise _failure(name, text, line, fault)
    zig, workers = find_zig(), os.cpu_count() or 1
    keys = {name: cache.key_of([text, _stamp()]) for name, text in texts.items()}
    new = [name for name in texts if cache.read(CACHE, keys[name]) is None]
    new.sort(key=lambda name: len(texts[name]), reverse=True)
    shares = [new[i::workers] for i in range(workers) if new[i::workers]]
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for _ in pool.map(lambda share: _by_clang(zig, share, texts), shares):
            pass
    for name in new:
        cache.write(CACHE, keys[name], b"good")


@once
def _stamp() -> str:
    """Everything besides the source that decides about the result."""
    return "\n".join([version(), *FLAGS, (INCLUDE / "metal_stdlib").read_text()])


def _by_clang(zig: Path, names: Sequence[str], texts: Mapping[str, str]) -> None:
    """Several kernels in one run, each with the file name `NAME.metal`."""
    text = "".join(f'# 1 "{n}.metal"\n{_as_cxx(texts[n])}\n' for n in names)
    done = run(zig, ["clang", *FLAGS, "-"], text=text)
    if done.returncode == 0:
        return
    error = re.search(r" error: (.*)$", done.stderr, re.M)
    # a fault that a declaration finds is in the header; a note says where it is used
    place = re.search(r"^(\w+)\.metal:(\d+):\d+: (?:fatal error|error|note): ", done.stderr, re.M)
    if error is None or place is None or place[1] not in texts:
        raise TargetError(f"clang says: {done.stderr.strip()[:500]}", where="check of Metal source")
    raise _failure(place[1], texts[place[1]], int(place[2]), f"clang says: {error[1]}")


def _as_cxx(text: str) -> str:
    """C++ has no automatic variables in an address space; the union is in every kernel's text."""
    text = THREADGROUP.sub(r"\1\2static threadgroup \3", text)
    name = re.search(r"kernel void (\w+)", text)
    return text.replace("__TVMArgUnion", f"Union_{name[1] if name else ''}")


def _by_rule(text: str) -> Iterator[tuple[int, str]]:
    """(line, fault) of what is right in C++ and wrong in Metal, or beyond its limits."""
    depth, spaces = 0, {name: space for space, name in SPACE.findall(text)}
    for number, line in enumerate(text.splitlines(), 1):
        if THREADGROUP.match(line) and depth != 1:
            yield (
                number,
                "threadgroup memory is declared outside of the outermost scope of a kernel",
            )
        if POINTER.search(line):
            yield number, "a pointer has no address space"
        for space, name in CAST.findall(line):
            if spaces.get(name, space) != space:
                yield number, f"{name} is in {spaces[name]} memory, the cast says {space}"
        for attribute in re.findall(r"\[\[\s*(\w+)", line):
            if attribute not in ATTRIBUTES:
                yield number, f"the attribute {attribute} is not known"
        for buffer in re.findall(r"\[\[ buffer\((\d+)\) \]\]", line):
            if int(buffer) >= BUFFERS:
                yield number, f"more than {BUFFERS} buffers"
        depth += line.count("{") - line.count("}")
    for struct in re.finditer(r"^struct \w+ \{\n(.*?)^\};", text, re.M | re.S):
        if struct[1].count(";") * 8 > ARGUMENT_BYTES:
            yield (
                text[: struct.start()].count("\n") + 1,
                f"more than {ARGUMENT_BYTES} bytes by value",
            )


def _failure(name: str, text: str, line: int, fault: str) -> TargetError:
    lines = text.splitlines()
    cited = f" [line {line}: {lines[line - 1].strip()}]" if 0 < line <= len(lines) else ""
    return TargetError(
        f"{fault}{cited}",
        where=f"kernel {name}",
        cure="this is a fault of k3tvm; compile with --dump DIR to see the Metal source",
    )
