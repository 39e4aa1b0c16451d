"""What a bundle says about itself: versions, hashes, kernels, parameters, state, as one JSON file.

A bundle is a folder:

    manifest.json        written last; without it there is no bundle
    code/KIND.so         compiled functions, one library per target
    params/*.bin         arrays at 64-byte boundaries, to be mapped into memory
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from k3tvm import __version__
from k3tvm.bundle.kernels import (
    DeviceKernel,
    KernelEntry,
    Point,
    device_kernel,
    kernel_entry,
)
from k3tvm.errors import BundleError

FORMAT = "k3tvm-bundle"
FORMAT_VERSION = 3  # 1: without `device_kernels`; 2: one number of rows for all code
FILE = "manifest.json"
ALIGNMENT = 64
DTYPES = {"uint8": 1, "uint16": 2, "int32": 4, "uint32": 4, "float32": 4}  # bytes of an element
AGAIN = "make the bundle again with 'k3tvm compile CHECKPOINT -o BUNDLE'"


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: path inside it, size in bytes, SHA-256 in hexadecimal."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ArrayEntry:
    """One parameter: where its bytes are, and how they came to be.

    `touched` is how many of them one decoded token must read, padding not counted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    nbytes: int
    touched: int
    recipe: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class StateEntry:
    """One state tensor; `slots` and `cap` in its shape are chosen when the bundle is opened."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class CodeEntry:
    """A compiled library: target name, kind, file, and which kernels serve the operators.

    mcpu, isa: of the code that the CPU runs. device_kernels: of the code that a GPU runs.
    max_rows: tokens of one call at most, which bounds the memory of activations; max_sequences:
    the same for sequences. captured: there is an entry `decode_captured`, which is one CUDA graph
    after its first call. points: what the traffic of kernels is given for.
    """

    target: str
    kind: str
    mcpu: str
    isa: str
    file: FileEntry
    kernels: tuple[KernelEntry, ...]
    max_rows: int
    max_sequences: int
    device_kernels: tuple[DeviceKernel, ...] = ()
    captured: bool = False
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The manifest. `activations` is the dtype between kernels; `config` the ModelConfig fields.

    `params` is empty for a bundle of code only. `seal` is the hash of everything else, set by
    `save`: sizes are used as they stand here, so an edited manifest could make kernels leave their
    arrays.
    """

    config: dict[str, Any]
    activations: str
    code: tuple[CodeEntry, ...]
    arrays: tuple[ArrayEntry, ...]
    params: tuple[FileEntry, ...]
    states: tuple[StateEntry, ...]
    sites: int
    slots: int
    context: int
    source: str
    versions: dict[str, str]
    has_weights: bool
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    created_by: str = field(default_factory=lambda: f"k3tvm {__version__}")
    seal: str = ""

    def save(self, folder: Path) -> None:
        """Seal, write manifest.json under a temporary name, then rename it."""
        part = folder / f"{FILE}.part"
        values = asdict(self) | {"seal": self._hash()}
        part.write_text(json.dumps(values, indent=1) + "\n")
        part.rename(folder / FILE)

    def check_seal(self, folder: Path) -> None:
        """BundleError when the manifest is not as it was written."""
        if self.seal != self._hash():
            raise damaged(folder, "it was changed after it was written")

    def _hash(self) -> str:
        values = asdict(self) | {"seal": ""}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check manifest.json; BundleError says what is wrong and what to do."""
        path = folder / FILE
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise BundleError(
                "is not a bundle: it has no manifest.json",
                where=str(folder),
                cure="make one with 'k3tvm compile CHECKPOINT -o BUNDLE'",
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"cannot be read: {error}", where=str(path), cure=AGAIN) from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise BundleError("is not the manifest of a bundle", where=str(path), cure=AGAIN)
        if values.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"has bundle format {values.get('format_version')}, this k3tvm reads"
                f" {FORMAT_VERSION}",
                where=str(path),
                cure="compile the checkpoint again with this version",
            )
        try:
            manifest = _parse(values)
            _check_plan(manifest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged(folder, f"{type(error).__name__} {error}") from None
        return manifest


def damaged(folder: Path, reason: str) -> BundleError:
    """The error for a manifest that contradicts itself."""
    return BundleError(f"is damaged: {reason}", where=str(folder / FILE), cure=AGAIN)


def _check_plan(manifest: Manifest) -> None:
    """ValueError unless there is code, sizes are usable, and arrays stay in their places."""
    for name in ("sites", "slots", "context"):
        if not _is_size(value := getattr(manifest, name)):
            raise ValueError(f"{name} is {value!r}")
    if not isinstance(manifest.config, dict) or not isinstance(manifest.versions, dict):
        raise ValueError("config and versions must be objects")
    for s in manifest.states:
        if s.dtype not in DTYPES or not all(d in ("slots", "cap") or _is_size(d) for d in s.shape):
            raise ValueError(f"state {s.name} is {s.dtype} {list(s.shape)}")
    if not manifest.code:
        raise ValueError("no code")
    if not all(_is_size(n) for c in manifest.code for n in (c.max_rows, c.max_sequences)):
        raise ValueError("code for no rows")
    files = (*(c.file for c in manifest.code), *manifest.params)
    for path in (PurePosixPath(f.path) for f in files):
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{path} leaves the bundle")
    sizes = {f.path: f.bytes for f in manifest.params}
    for a in manifest.arrays if manifest.has_weights else ():
        if a.dtype not in DTYPES or not all(_is_size(d) for d in a.shape):
            raise ValueError(f"{a.name} is {a.dtype} {list(a.shape)}")
        if a.nbytes != math.prod(a.shape) * DTYPES[a.dtype]:
            raise ValueError(f"{a.name} is said to have {a.nbytes} bytes")
        if a.offset < 0 or a.offset % ALIGNMENT or a.offset + a.nbytes > sizes[a.file]:
            raise ValueError(f"{a.name} is misplaced in its file")


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _parse(v: dict[str, Any]) -> Manifest:
    def code(c: dict[str, Any]) -> CodeEntry:
        own = {
            "file": FileEntry(**c["file"]),
            "kernels": tuple(kernel_entry(k) for k in c["kernels"]),
            "device_kernels": tuple(device_kernel(k) for k in c["device_kernels"]),
            "points": tuple(Point(**p) for p in c["points"]),
        }
        return CodeEntry(**(c | own))

    def array(a: dict[str, Any]) -> ArrayEntry:
        return ArrayEntry(**(a | {"shape": tuple(a["shape"]), "sources": tuple(a["sources"])}))

    parsed = {
        "code": tuple(code(c) for c in v["code"]),
        "arrays": tuple(array(a) for a in v["arrays"]),
        "params": tuple(FileEntry(**f) for f in v["params"]),
        "states": tuple(StateEntry(**(s | {"shape": tuple(s["shape"])})) for s in v["states"]),
    }
    return Manifest(**(v | parsed))
