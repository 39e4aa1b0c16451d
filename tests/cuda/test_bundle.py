"""A whole model for CUDA, compiled without a GPU: what the bundle has, and who may open it."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3tvm.bundle.manifest import Manifest
from k3tvm.cuda import fatbin, runtime
from k3tvm.cuda.module import find_module
from k3tvm.cuda.runtime import CudaDevice
from k3tvm.errors import DeviceError
from k3tvm.runtime.device import open_device
from tests.cuda.toolkit import require_toolkit


@pytest.fixture(scope="module")
def bundle(bundles) -> Path:
    require_toolkit()
    return bundles.bundle("k3-tiny", target="cuda:sm_90a")


def test_every_kernel_of_the_manifest_is_in_the_library(bundle):
    (code,) = Manifest.load(bundle).code
    assert (code.kind, code.target, code.captured) == ("cuda", "cuda:sm_90a", True)
    library = (bundle / code.file.path).read_bytes()
    module, names = find_module(library), {k.name for k in code.device_kernels}
    assert len(names) > 50 and module.kernels.keys() == names
    found = fatbin.images(module.code)
    assert [(i.kind, i.arch) for i in found] == [("ELF", "sm_90a"), ("PTX", "sm_90")]
    assert all(set(i.kernels()) == names for i in found)
    assert not fatbin.has_source(library)


def test_manifest_has_the_resources_of_every_kernel(bundle):
    for kernel in Manifest.load(bundle).code[0].device_kernels:
        (found,) = kernel.resources
        assert found.arch == "sm_90a" and 0 < found.registers <= 255, kernel.name
        assert found.shared_bytes >= kernel.shared_bytes, kernel.name


def test_bundle_is_for_a_device_that_can_run_it(bundle, monkeypatch):
    """The device is made up, so that only the choice is tested."""
    manifest, known = Manifest.load(bundle), [CudaDevice(0, "A100", (8, 0))]
    monkeypatch.setattr(runtime, "devices", lambda: known)
    words = (
        r"cuda:0 A100: .*has compute capability 8.0, the code is for sm_90a.*--target cuda:sm_80"
    )
    with pytest.raises(DeviceError, match=words):
        open_device(bundle, manifest, "cuda")
    known.append(CudaDevice(1, "H200", (9, 0)))
    chosen: list[tuple[int, int, str]] = []
    memory = "k3tvm.runtime.device_memory.DeviceMemory"
    monkeypatch.setattr(memory, lambda *arguments: chosen.append(arguments))
    assert open_device(bundle, manifest, "cuda:1").label == "cuda:1 H200"
    assert chosen == [(runtime.CUDA, 1, "k3tvm.cuda")]


def test_machine_without_a_driver_says_so(bundle, monkeypatch):
    monkeypatch.setattr(runtime, "DRIVER", "libnothing.so.1")
    monkeypatch.setattr(runtime, "load", runtime.load.__wrapped__)
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        open_device(bundle, Manifest.load(bundle), "cuda")
