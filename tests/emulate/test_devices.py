"""What is emulated says so, and never takes the place of a real device by accident."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3tvm import emulate
from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.compiler.targets import profile_of
from k3tvm.emulate import build
from k3tvm.errors import DeviceError, TargetError
from k3tvm.schedules.gpu import grid as g
from tests.kernels import compiled_module

KINDS = ("cuda", "metal")


@pytest.mark.parametrize("kind", KINDS)
def test_f26_a_real_device_is_not_hidden(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "_real", lambda kind: "there is a real one")
    monkeypatch.delenv(emulate.PREFER, raising=False)
    with pytest.raises(DeviceError, match="is not used where there is a real one") as caught:
        emulate.install.__wrapped__(kind)
    assert caught.value.where == f"{kind}-emulated" and "K3TVM_EMULATE=1" in caught.value.cure
    monkeypatch.setenv(emulate.PREFER, "1")
    emulate.install.__wrapped__(kind)


def test_f26_a_driver_with_devices_counts_as_real(tmp_path: Path) -> None:
    """With a driver of three lines in the place of NVIDIA's."""
    source, driver = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(
        "int cuInit(int flags) { return 0; }\n"
        "int cuDeviceGetCount(int* count) { *count = 2; return 0; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(driver)], check=True)
    code = "from k3tvm import emulate; print(emulate._real('cuda')); emulate.install('cuda')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "there is an NVIDIA GPU\n"
    assert done.returncode and "is not used where there is an NVIDIA GPU" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_says_emulated(kind: str) -> None:
    emulate.install(kind)
    device = tvm.device(kind, 0)
    assert device.exist and device.device_name == emulate.NAMES[kind]
    assert "emulated" in device.device_name
    assert not tvm.device(kind, 1).exist


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_run_from_a_library_without_a_compiler(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = profile_of(f"{kind}-emulated")
    module = compiled_module("twice", twice(), profile)
    library = tmp_path / "twice.so"
    module.export_library(str(library))
    monkeypatch.setenv("CXX", "no-such-compiler")
    loaded = tvm.runtime.load_module(str(library))
    assert loaded.imports[0].kind == f"{kind}_emulated"
    x = tvm.runtime.tensor(np.arange(7, dtype=np.float32), tvm.device(kind, 0))
    loaded["twice"](x)
    np.testing.assert_array_equal(x.numpy(), 2 * np.arange(7))


def twice():
    """x *= 2."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("twice")
        n = tvm.tirx.Var("n", "int32")
        x = T.match_buffer(T.arg("x", T.handle()), (n,), "float32")
        with g.each(n) as i:
            g.store(x, x[i] * g.floats(2.0), i)
    return builder.get()


def test_without_a_compiler_the_cure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TargetError, match="no C\\+\\+ compiler.*install g\\+\\+"):
        build.check_tools()


def test_text_that_does_not_compile_is_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("K3TVM_CACHE", str(tmp_path))
    from k3tvm.emulate.text import Piece

    bad = Piece("bad", 'extern "C" __global__ void bad(int* x) { x = nonsense; }')
    with pytest.raises(TargetError, match="do not compile.*nonsense") as caught:
        build.compiled("cuda", "", [bad])
    assert "\n" not in str(caught.value) and not list(tmp_path.rglob("*"))


def test_a_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emulate.SEED, "backwards")
    with pytest.raises(DeviceError, match="is 'backwards'"):
        emulate._seed()
