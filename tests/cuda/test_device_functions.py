"""Calls of our device functions bring their files along, once and in order."""

from __future__ import annotations

import pytest

from k3tvm.cuda import device
from k3tvm.errors import TargetError

HEAD = "__device__ __forceinline__ "
FILES = {
    "a.cuh": f"{HEAD}int k3_top(int x) {{ return k3_base(x) + k3_base(x); }}",
    "b.cuh": f"{HEAD}float *k3_base(int x) {{ return 0; }}",
    "c.cuh": f"#define M(t) \\\n {HEAD}void k3_of_##t() {{}} \\\n {HEAD}void k3_##t##_new() {{}}",
    "d.cuh": f"{HEAD}void k3_of_all(int x) {{}}",
}


@pytest.fixture
def some_files(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(device, "FOLDER", tmp_path)
    device.files.cache_clear()
    yield
    monkeypatch.undo()
    device.files.cache_clear()


def taken(text: str) -> list[str]:
    functions = device.device_functions(text)
    found = {name: functions.find(body) for name, body in FILES.items() if body in functions}
    assert all(functions.count(FILES[name]) == 1 for name in found)
    return sorted(found, key=lambda name: found[name])


@pytest.mark.parametrize(
    "text, files",
    [
        ("x = y;", []),
        ("k3_base(1);", ["b.cuh"]),
        ("k3_top(1);", ["b.cuh", "a.cuh"]),
        ("k3_top(1); k3_base(2);", ["b.cuh", "a.cuh"]),
        ("k3_of_f16 (1);", ["c.cuh"]),
        ("k3_f16_new();", ["c.cuh"]),
        ("k3_of_all(1);", ["d.cuh"]),
    ],
)
def test_files_are_taken_for_what_is_called(some_files, text, files):
    assert taken(text) == files


def test_unknown_function(some_files):
    with pytest.raises(TargetError, match="defines k3_nothing"):
        device.device_functions("k3_nothing();")


def test_every_file_has_functions_and_finds_what_it_calls():
    for functions in device.files():
        assert functions.names or functions.patterns, functions.name
        for name in functions.calls():
            assert device.device_functions(f"{name}()")
