"""What tests of the CUDA toolchain share: the toolkit, and the compilation of one operator."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from k3tvm.cuda.tools import Toolkit, find_toolkit
from k3tvm.errors import TargetError


@cache
def _found() -> Toolkit | str:
    try:
        return find_toolkit()
    except TargetError as error:
        return str(error)


def require_toolkit() -> Toolkit:
    """The toolkit; without one the test is skipped, or fails in CI."""
    found = _found()
    if isinstance(found, str):
        if os.environ.get("CI"):
            pytest.fail(found)
        pytest.skip(found)
    return found


def shared_library(source: str, path: Path) -> Path:
    """A library of C code."""
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)
    return path
