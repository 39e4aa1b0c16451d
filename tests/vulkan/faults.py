"""Builds the Vulkan loader with faults (tests/native/faulty_loader.cc), once per test run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "native" / "faulty_loader.cc"


built: list[Path] = []


def loader(factory: pytest.TempPathFactory) -> Path:
    """The shared library; processes use it through K3TVM_VULKAN_LOADER, see FAULTS there."""
    if not built:
        library = factory.mktemp("loader") / "libfaulty.so"
        command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(library)]
        subprocess.run([*command, "-ldl"], check=True)
        built.append(library)
    return built[0]
