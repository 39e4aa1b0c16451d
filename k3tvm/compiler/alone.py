"""Keeps two runs from preparing the same bundle at once, by a lock on its folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3tvm.errors import BundleError


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make `folder` and hold it inside the block; BundleError when another run holds it.

    The lock ends with the process, however it ends. File systems without locks get none.
    """
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _hold(descriptor, folder):
            raise BundleError(
                "is being written by another run",
                where=str(folder),
                cure="wait for it, or choose another folder with -o",
            )
        yield
    finally:
        os.close(descriptor)


def _hold(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here, as on some network file systems
        return True
    # the other run may have renamed or removed it between opening and locking
    return folder.is_dir() and os.path.samestat(os.fstat(descriptor), folder.stat())
