"""Writes parameter files, resumes an interrupted writing by hash, and maps them back.

Each file is written under a temporary name and renamed when complete. A journal notes for every
finished file what it was made from and its hash; a later run keeps a file only when the journal
has the same origin and the file still has the hash.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3tvm.bundle.manifest import ALIGNMENT, ArrayEntry, FileEntry
from k3tvm.errors import BundleError

JOURNAL = "journal.json"
FOLDER = "params"
Pieces = Iterable[np.ndarray[Any, Any]]
Report = Callable[[int], None]


@dataclass(frozen=True)
class Unit:
    """What one parameter file holds: its name, its arrays, and a fingerprint of their origin."""

    name: str
    arrays: tuple[ArrayEntry, ...]
    nbytes: int
    origin: str


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def sha256(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ParamsWriter:
    """Writes units into `folder`/params, keeping what an earlier, interrupted run finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal_path = self.folder / JOURNAL
        self.journal = self._read_journal()

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        try:
            journal = json.loads(self.journal_path.read_text())
        except (OSError, ValueError):
            return {}
        entries = journal.items() if isinstance(journal, dict) else ()
        return {name: noted for name, noted in entries if isinstance(noted, dict)}

    def kept(self, unit: Unit) -> FileEntry | None:
        """The file of a unit if an earlier run finished it from the same origin, bit for bit."""
        noted = self.journal.get(unit.name)
        path = self.folder / f"{unit.name}.bin"
        if not noted or noted.get("origin") != unit.origin or not path.is_file():
            return None
        if path.stat().st_size != unit.nbytes or sha256(path) != noted.get("sha256"):
            return None
        return FileEntry(f"{FOLDER}/{path.name}", unit.nbytes, noted["sha256"])

    def write(
        self, unit: Unit, pieces_of: Callable[[ArrayEntry], Pieces], report: Report
    ) -> FileEntry:
        """Write one unit; `report` gets the bytes of every piece."""
        path = self.folder / f"{unit.name}.bin"
        part = path.with_suffix(".part")
        digest = hashlib.sha256()
        with part.open("wb") as file:
            for data in _stream(unit, pieces_of):
                file.write(data)
                digest.update(data)
                report(len(data))
        part.rename(path)
        entry = FileEntry(f"{FOLDER}/{path.name}", unit.nbytes, digest.hexdigest())
        self.journal[unit.name] = {"origin": unit.origin, **asdict(entry)}
        self._save_journal()
        return entry

    def _save_journal(self) -> None:
        part = self.journal_path.with_suffix(".part")
        part.write_text(json.dumps(self.journal))
        part.rename(self.journal_path)

    def close(self, entries: Sequence[FileEntry]) -> None:
        """Leave only the files of the bundle: the manifest takes over from the journal.

        Another, interrupted run may have left files of layers that this model does not have.
        """
        known = {entry.path for entry in entries}
        for path in self.folder.iterdir():
            if f"{FOLDER}/{path.name}" not in known:
                path.unlink()


def _stream(unit: Unit, pieces_of: Callable[[ArrayEntry], Pieces]) -> Iterator[memoryview | bytes]:
    at = 0
    for array in unit.arrays:
        yield bytes(array.offset - at)
        at = array.offset
        for piece in pieces_of(array):
            data = piece.reshape(-1).view(np.uint8).data
            at += len(data)
            yield data
        if at != array.offset + array.nbytes:
            raise BundleError(
                f"{at - array.offset} bytes were converted, {array.nbytes} were planned",
                where=array.name,
                cure="this is a fault of k3tvm, not of the checkpoint",
            )
    yield bytes(unit.nbytes - at)


def check_file(folder: Path, entry: FileEntry, content: bool) -> None:
    """BundleError unless the file has its size and, if `content`, its hash."""
    path = folder / entry.path
    cure = "copy the bundle again, or compile the checkpoint again"
    if not path.is_file():
        raise BundleError("is missing", where=str(path), cure=cure)
    size = path.stat().st_size
    if size != entry.bytes:
        raise BundleError(f"has {size} bytes, not {entry.bytes}", where=str(path), cure=cure)
    if content and sha256(path) != entry.sha256:
        raise BundleError("has another content than its hash says", where=str(path), cure=cure)


def check_files(folder: Path, entries: Sequence[FileEntry], content: bool) -> None:
    """`check_file` for several files, side by side: hashing is most of the time of opening."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda entry: check_file(folder, entry, content), entries))


def map_arrays(folder: Path, arrays: Sequence[ArrayEntry]) -> list[np.ndarray[Any, Any]]:
    """The arrays as views of private memory maps: read on demand, shared between processes."""
    maps: dict[str, mmap.mmap] = {}
    result = []
    for a in arrays:
        if a.file not in maps:
            with (folder / a.file).open("rb") as file:
                maps[a.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = int(np.prod(a.shape, dtype=np.int64))
        view = np.frombuffer(maps[a.file], a.dtype, count, a.offset)
        result.append(view.reshape(a.shape))
    return result
