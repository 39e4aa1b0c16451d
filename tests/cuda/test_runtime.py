"""Devices and memory of CUDA, with a stand-in for NVIDIA's library; what is missing is named."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from k3tvm.cuda import runtime
from k3tvm.cuda.fatbin import Image
from k3tvm.cuda.runtime import CudaDevice, Cudart
from k3tvm.errors import DeviceError
from tests.cuda.toolkit import shared_library

CUDART = """
#include <string.h>
#include <stddef.h>
static int device = -1;
const char *cudaGetErrorString(int code) { return code == 35 ? "driver too old" : "unknown"; }
int cudaGetDeviceCount(int *n) { *n = 0; return 35; }
int cudaSetDevice(int n) { device = n; return n > 1 ? 101 : 0; }
int cudaMemGetInfo(size_t *free, size_t *all) {
  *free = 1000 - device;
  *all = 5000000000;
  return 0;
}
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  memset(to, value, size);
  return stream != 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  memcpy(to, from, size);
  return kind != 3 || stream != 0;
}
"""


@pytest.fixture
def cudart(tmp_path: Path) -> Cudart:
    return Cudart(ctypes.CDLL(str(shared_library(CUDART, tmp_path / "libcudart.so"))))


def on_device(array: np.ndarray, index: int = 0) -> SimpleNamespace:
    """A tensor as the functions see it."""
    pointer = SimpleNamespace(index=index)
    return SimpleNamespace(data_ptr=lambda: array.ctypes.data, device=pointer)


def test_fill_and_copy_reach_their_bytes_only(cudart):
    array = np.arange(32, dtype=np.uint8)
    cudart.fill(on_device(array), 8, 4, 0)
    cudart.copy(on_device(array), 20, on_device(array), 1, 3)
    expected = np.arange(32, dtype=np.uint8)
    expected[8:12], expected[20:23] = 0, (1, 2, 3)
    assert array.tolist() == expected.tolist()


def test_memory_is_that_of_the_device(cudart):
    first, second = (json.loads(cudart.stats(index)) for index in (0, 1))
    assert first["budget_bytes"] == 5_000_000_000
    assert second["used_bytes"] == first["used_bytes"] + 1
    assert json.loads(cudart.stats(0))["peak_bytes"] == second["used_bytes"]


def test_errors_have_the_drivers_words(cudart):
    with pytest.raises(DeviceError, match=r"cudaGetDeviceCount: driver too old \(error 35\)"):
        cudart.count()
    with pytest.raises(DeviceError, match=r"cudaSetDevice: unknown \(error 101\)"):
        cudart.fill(on_device(np.zeros(4, np.uint8), 2), 0, 4, 0)


@pytest.mark.parametrize(
    "kind, arch, capability, runs",
    [
        ("ELF", "sm_80", (8, 0), True),
        ("ELF", "sm_80", (8, 9), True),
        ("ELF", "sm_86", (8, 0), False),
        ("ELF", "sm_80", (9, 0), False),
        ("ELF", "sm_90a", (9, 0), True),
        ("ELF", "sm_100a", (10, 3), False),
        ("ELF", "sm_120", (12, 1), True),
        ("PTX", "sm_80", (9, 0), True),
        ("PTX", "sm_120", (12, 0), True),
        ("PTX", "sm_120", (13, 0), True),
        ("PTX", "sm_120", (10, 0), False),
        ("PTX", "sm_90a", (10, 0), False),
    ],
)
def test_which_devices_run_which_code(kind, arch, capability, runs):
    assert CudaDevice(0, "", capability).runs(Image(kind, arch, b"", 0, 0)) is runs


@pytest.fixture
def two_devices(monkeypatch):
    known = [CudaDevice(0, "NVIDIA H200", (9, 0)), CudaDevice(1, "NVIDIA T4", (7, 5))]
    monkeypatch.setattr(runtime, "devices", lambda: known)


@pytest.mark.parametrize("selector, index", [("", 0), ("1", 1), ("h200", 0), ("T4", 1)])
def test_devices_are_chosen(two_devices, selector, index):
    assert runtime.find(selector).index == index


@pytest.mark.parametrize("selector", ["2", "A100"])
def test_device_that_is_not_there(two_devices, selector):
    with pytest.raises(
        DeviceError, match=rf"cuda:{selector}: .*0 \(NVIDIA H200\), 1 \(NVIDIA T4\)"
    ):
        runtime.find(selector)


def test_code_for_other_devices_is_refused(monkeypatch, tmp_path):
    found = (Image("ELF", "sm_80", b"", 0, 0), Image("PTX", "sm_90", b"", 0, 0))
    monkeypatch.setattr(runtime, "find_module", lambda data, where: SimpleNamespace(code=b""))
    monkeypatch.setattr(runtime, "images", lambda data, where: found)
    (tmp_path / "cuda.so").write_bytes(b"")
    assert runtime.lacks(CudaDevice(0, "", (9, 0)), tmp_path / "cuda.so") == ""
    reason = runtime.lacks(CudaDevice(0, "", (7, 5)), tmp_path / "cuda.so")
    assert reason == "it has compute capability 7.5, the code is for sm_80, sm_90 (PTX)"


def test_missing_driver_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(runtime, "DRIVER", "libnothing.so.1")
    with pytest.raises(DeviceError, match="no NVIDIA driver .*libnothing.*; install it, or use"):
        runtime.load.__wrapped__()


def test_missing_cudart_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(runtime, "DRIVER", "libc.so.6")
    monkeypatch.setattr(runtime, "cudart_candidates", lambda: iter(["libnothing.so.13"]))
    with pytest.raises(DeviceError, match=r"libcudart.so.13 is not found .*k3tvm\[cuda\]"):
        runtime.load.__wrapped__()
