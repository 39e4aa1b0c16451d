"""NVIDIA's compiler is found where it is, and a missing or unfit one is named (F25)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from k3tvm.cuda import tools
from k3tvm.errors import TargetError
from tests.cuda.toolkit import require_toolkit

NVCC = """#!/bin/sh
case "$1" in
--version) echo 'Cuda compilation tools, release VERSION, V13.0.88' ;;
--list-gpu-code) printf 'sm_80\\nsm_90\\n' ;;
esac
"""


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No toolkit anywhere, g++ apart; returns a folder to put one into."""
    for name in ("K3TVM_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(tools, "package_folders", lambda: [tmp_path / "cu13"])
    return tmp_path


def put(folder: Path, version: str = "13.0", missing: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in {"nvcc", "ptxas", "fatbinary"} - {missing}:
        path = folder / name
        path.write_text(NVCC.replace("VERSION", version))
        path.chmod(0o755)
    return folder / "nvcc"


@pytest.mark.parametrize("place", ["variable", "home", "path", "package"])
def test_every_place_is_searched(nothing, monkeypatch, place):
    folder = nothing / "own" if place == "variable" else nothing / "bin"
    if place == "package":
        folder = nothing / "cu13" / "bin"
    nvcc = put(folder)
    if place == "variable":
        monkeypatch.setenv("K3TVM_NVCC", str(nvcc))
    if place == "home":
        monkeypatch.setenv("CUDA_HOME", str(nothing))
    found = tools.find_toolkit(["sm_80", "sm_90a"])
    assert (found.folder, found.version, found.stamp) == (folder, (13, 0), "V13.0.88")


def test_a_toolkit_that_knows_the_architecture_is_preferred(nothing):
    put(nothing / "bin", "12.0")
    wanted = put(nothing / "cu13" / "bin")
    assert tools.find_toolkit(["sm_80"]).folder == wanted.parent


@pytest.mark.parametrize(
    "version, missing, archs, words",
    [
        ("12.0", "", [], "version 12.0, too old"),
        ("13.0", "ptxas", [], "has no ptxas beside it"),
        ("13.0", "", ["sm_80", "sm_120"], "does not know sm_120"),
        ("new", "", [], "does not tell its version"),
    ],
)
def test_unfit_toolkit_is_named_with_the_cure(nothing, version, missing, archs, words):
    put(nothing / "bin", version, missing)
    with pytest.raises(TargetError, match=words) as caught:
        tools.find_toolkit(archs)
    assert "pip install 'k3tvm[cuda]'" in str(caught.value)


def test_missing_toolkit_and_missing_host_compiler(nothing):
    with pytest.raises(TargetError, match="CUDA compiler: was not found"):
        tools.find_toolkit()
    (nothing / "bin" / "g++").unlink()
    with pytest.raises(TargetError, match=r"no g\+\+ is found"):
        tools.find_toolkit()


def test_file_that_cannot_be_run(nothing, monkeypatch):
    nvcc = put(nothing / "own")
    nvcc.write_bytes(b"\x7fELF of another machine")
    monkeypatch.setenv("K3TVM_NVCC", str(nvcc))
    with pytest.raises(TargetError, match="cannot be run"):
        tools.find_toolkit()


def test_the_real_one_knows_every_default_architecture():
    from k3tvm.compiler.targets.cuda import ARCHS

    require_toolkit()
    assert all(tools.find_toolkit(ARCHS).knows(arch) for arch in ARCHS)
    assert re.fullmatch(r"\d+\.\d+ \(/.*/nvcc\)", tools.tools()["nvcc"])
