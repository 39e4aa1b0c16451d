"""Reads what a file for macOS or iOS says about itself: Mach-O libraries, objects, archives.

Apple's `otool` and `nm` are on Apple's systems only; this reads as much as a test of cross-compiled
code needs. The format is that of the system headers `mach-o/loader.h` and `mach-o/nlist.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from k3tvm.errors import BundleError

MAGIC = 0xFEEDFACF  # 64 bits, little endian
CPUS = {0x0100000C: "arm64", 0x01000007: "x86_64"}
KINDS = {1: "object", 2: "executable", 6: "dylib"}
PLATFORMS = {1: "macos", 2: "ios", 7: "ios-simulator"}
# Load commands
SYMBOLS, LOADED_LIBRARY, OWN_NAME, BUILD_VERSION = 0x2, 0xC, 0xD, 0x32
BINDINGS = (0x22, 0x80000022)
DEBUG, KIND, EXTERNAL = 0xE0, 0x0E, 0x01  # bits of a symbol's type; kind 0 is undefined
ARCHIVE = b"!<arch>\n"


@dataclass
class MachO:
    """One file. platform, oldest: of the system that it is for. name: by which a dylib is loaded.

    libraries: dylibs that it loads. defined, undefined: its external symbols, as C spells them.
    anywhere: undefined ones that are looked for in everything that is loaded.
    """

    cpu: str
    kind: str
    platform: str = ""
    oldest: str = ""
    name: str = ""
    libraries: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    anywhere: set[str] = field(default_factory=set)


def read(data: bytes, where: str = "Mach-O file") -> MachO:
    """The facts of a library or object; BundleError if it is none, or is cut short."""
    try:
        return _read(data)
    except (struct.error, ValueError) as error:
        raise BundleError(f"is not a Mach-O file of 64 bits: {error}", where=where) from None


def members(data: bytes, where: str = "archive") -> Iterator[tuple[str, bytes]]:
    """The files of a static archive by name, its index left out; BundleError if it is none."""
    if not data.startswith(ARCHIVE):
        raise BundleError("is not a static archive", where=where)
    at = len(ARCHIVE)
    while at + 60 <= len(data):
        name, size = data[at : at + 16].decode().strip(), int(data[at + 48 : at + 58])
        body = data[at + 60 : at + 60 + size]
        if name.startswith("#1/"):  # the name stands before the content
            length = int(name[3:])
            name, body = body[:length].rstrip(b"\0").decode(), body[length:]
        if not name.startswith("__.SYMDEF"):
            yield name, body
        at += 60 + size + size % 2


def _read(data: bytes) -> MachO:
    magic, cpu, _, kind, commands = struct.unpack_from("<5I", data)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic:#x}")
    found = MachO(CPUS.get(cpu, hex(cpu)), KINDS.get(kind, str(kind)))
    at = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        _command(found, data, at, command)
        at += size
    return found


def _command(found: MachO, data: bytes, at: int, command: int) -> None:
    if command == BUILD_VERSION:
        platform, oldest = struct.unpack_from("<2I", data, at + 8)
        found.platform = PLATFORMS.get(platform, str(platform))
        found.oldest = f"{oldest >> 16}.{oldest >> 8 & 255}"
    elif command in (OWN_NAME, LOADED_LIBRARY):
        text = _text(data, at + struct.unpack_from("<I", data, at + 8)[0])
        if command == OWN_NAME:
            found.name = text
        else:
            found.libraries.append(text)
    elif command == SYMBOLS:
        _symbols(found, data, *struct.unpack_from("<3I", data, at + 8))
    elif command in BINDINGS:
        eager, eager_size, _, _, lazy, lazy_size = struct.unpack_from("<6I", data, at + 16)
        for begin, size in ((eager, eager_size), (lazy, lazy_size)):
            found.anywhere.update(_looked_for_anywhere(data[begin : begin + size]))


def _symbols(found: MachO, data: bytes, first: int, count: int, strings: int) -> None:
    for i in range(count):
        name, kind, _, _, value = struct.unpack_from("<IBBHQ", data, first + 16 * i)
        if kind & DEBUG or not kind & EXTERNAL:
            continue
        text = _text(data, strings + name).removeprefix("_")
        # an undefined symbol with a value is memory to be had, not to be found
        undefined = not kind & KIND and not value
        (found.undefined if undefined else found.defined).add(text)


def _looked_for_anywhere(program: bytes) -> Iterator[str]:
    """Symbols that the loader binds without naming a library, from the loader's little program."""
    at, name, anywhere = 0, "", False
    while at < len(program):
        operation, value = program[at] & 0xF0, program[at] & 0x0F
        at += 1
        if operation == 0x10:  # a library by number
            anywhere = False
        elif operation == 0x30:  # no library; -2 is all of them
            anywhere = value == 0xE
        elif operation == 0x40:
            text = _text(program, at)
            name, at = text.removeprefix("_"), at + len(text) + 1
        elif operation in (0x20, 0x60, 0x70, 0x80, 0xA0, 0xC0):
            anywhere = anywhere and operation != 0x20
            for _ in range(2 if operation == 0xC0 else 1):  # numbers of seven bits a byte
                while program[at] & 0x80:
                    at += 1
                at += 1
        if operation in (0x90, 0xA0, 0xB0, 0xC0) and anywhere:
            yield name


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
