"""Building the plug-in: a missing compiler or header is one clear line, and nothing half made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from k3tvm.errors import DeviceError
from k3tvm.native import library
from k3tvm.native.build import stamp
from k3tvm.vulkan import compile_plugin as build

GOOD = """#include <vulkan/vulkan.h>
extern "C" const char* stamp() { return "k3tvm-abi[" K3TVM_ABI "]"; }
"""


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A folder in the place of native/, so that a build takes a moment."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "one.cc").write_text(GOOD)
    (folder / "two.cc").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(build, "NATIVE", folder)
    return folder


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_library_says_for_which_tvm_it_was_built(sources, tmp_path):
    made = tmp_path / "out" / "plugin.so"
    build.compile_plugin(made)
    assert library.built_for(made) == library.ABI == stamp()
    assert list(made.parent.iterdir()) == [made]


def test_without_a_compiler_the_cure_is_said(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler.*apt install libvulkan-dev g\+\+"):
        build.compile_plugin(tmp_path / "plugin.so")


def test_without_vulkan_headers_the_cure_is_said(sources, tmp_path, monkeypatch):
    compiler = script(tmp_path / "cxx", 'case "$*" in *vulkan.h*) exit 1;; esac; exec g++ "$@"')
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(DeviceError, match="no Vulkan headers.*apt install libvulkan-dev"):
        build.compile_plugin(tmp_path / "plugin.so")


def test_a_build_that_fails_leaves_the_old_library(sources, tmp_path):
    made = tmp_path / "out" / "plugin.so"
    build.compile_plugin(made)
    before = made.read_bytes()
    (sources / "two.cc").write_text("int two() { return two; }\n")
    with pytest.raises(DeviceError, match="does not compile.*two.cc") as error:
        build.compile_plugin(made)
    assert "\n" not in str(error.value)
    assert made.read_bytes() == before
    assert list(made.parent.iterdir()) == [made]


def test_a_new_library_replaces_the_old_one_in_one_step(sources, tmp_path):
    """Processes that have loaded the old file keep it: another inode."""
    made = tmp_path / "plugin.so"
    build.compile_plugin(made)
    with made.open("rb") as old:
        before = old.read()
        (sources / "two.cc").write_text("int three() { return 3; }\n")
        build.compile_plugin(made)
        old.seek(0)
        assert old.read() == before
    assert made.read_bytes() != before


def test_an_installation_without_a_compiler_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said: list[str] = []
    command = setup_command(monkeypatch)
    command.warn = said.append
    extension = type("Extension", (), {"name": "k3tvm.vulkan.libk3tvm_vulkan"})
    command.build_lib = str(tmp_path)
    command.inplace = False
    command.package = None
    command.build_extension(extension)
    assert len(said) == 1 and "no C++ compiler" in said[0]
    assert command.get_ext_fullpath(extension.name) == str(
        tmp_path / "k3tvm" / "vulkan" / build.LIBRARY
    )


def setup_command(monkeypatch):
    """The build command of setup.py, without running setup."""
    setuptools = pytest.importorskip("setuptools")
    taken = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: taken.update(given))
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = (Path(build.__file__).parents[2] / "setup.py").read_text()
    names = {"__file__": str(Path(build.__file__).parents[2] / "setup.py"), "__name__": "setup"}
    exec(compile(text, "setup.py", "exec"), names)
    from setuptools.dist import Distribution

    return taken["cmdclass"]["build_ext"](Distribution())
