"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from k3tvm._ffi import tvm_ffi
from tests.bundles import Bundles

LAYER = "K3TVM_VULKAN_VALIDATION"
if os.environ.get("CI"):
    os.environ.setdefault(LAYER, "1")  # before a device is opened; tests' processes inherit it


@pytest.fixture(scope="session", autouse=True)
def silent_validation_layer() -> Iterator[None]:
    """Under Khronos' validation layer the run fails if the layer had anything to say."""
    yield
    messages = tvm_ffi.get_global_func("k3tvm.vulkan.validation_messages", allow_missing=True)
    if messages is not None and os.environ.get(LAYER):
        assert [str(m) for m in messages()] == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: for tiny tensors a second one only waits, long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Example checkpoints and bundles, made when first asked for."""
    return Bundles(tmp_path_factory.mktemp("bundles"))
