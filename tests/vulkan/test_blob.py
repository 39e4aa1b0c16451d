"""The blob of kernels, and the limits of a target that every kernel is held against (F25, F30)."""

from __future__ import annotations

import dataclasses

import pytest

from k3tvm.errors import BundleError, TargetError
from k3tvm.schedules.profile import GpuProfile
from k3tvm.vulkan.limits import check_grid, check_kernel, profile_of
from k3tvm.vulkan.module import KernelInfo, read_module, write_module
from tests.vulkan.shaders import PROFILE, target

KERNEL = KernelInfo(
    name="gemv",
    kinds="pPil",
    block=True,
    tags=(0, 3, 4),
    local_size=(32, 4, 1),
    shared_bytes=512,
    features=frozenset({"float16", "int8"}),
    source="#version 460\n",
    spirv=b"\x03\x02\x23\x07",
)
OTHER = dataclasses.replace(KERNEL, name="scan", block=False, tags=(), features=frozenset())


def test_blob_gives_back_what_was_written():
    assert read_module(write_module([KERNEL, OTHER])) == (KERNEL, OTHER)
    assert read_module(write_module([])) == ()


def test_blob_that_ends_early_is_refused_wherever_it_ends():
    blob = write_module([KERNEL])
    for length in range(len(blob)):
        with pytest.raises(BundleError):
            read_module(blob[:length])
    with pytest.raises(BundleError, match="after its end"):
        read_module(blob + b"\0")


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"KVK1" + bytes(8), "not a module"),
        (b"K3VK" + bytes([9, 0, 0, 0, 0, 0, 0, 0]), "format 9, this k3tvm reads 1"),
        (b"K3VK" + bytes([1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0xFF]), "damaged"),
    ],
)
def test_foreign_blob_is_refused(blob, words):
    with pytest.raises(BundleError, match=words):
        read_module(blob)


ROOMY = GpuProfile("vulkan", "roomy", 128, (64, 64, 64), 512, features=KERNEL.features)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": 127}, "gemv: needs 128 threads in a workgroup, roomy has 127"),
        ({"threads_xyz": (64, 3, 64)}, "gemv: needs 4 threads in y, roomy has 3"),
        ({"shared_bytes": 511}, "gemv: needs 512 bytes of shared memory, roomy has 511"),
        ({"features": frozenset({"int8"})}, "gemv: needs float16, which roomy lacks"),
    ],
)
def test_kernel_beyond_the_target_names_need_and_limit(change, words):
    check_kernel(KERNEL, ROOMY)
    with pytest.raises(TargetError, match=words):
        check_kernel(KERNEL, dataclasses.replace(ROOMY, **change))


def test_launch_beyond_the_target_is_refused_when_compiled():
    check_grid("gemv", (65535, 1, 0), ROOMY)
    with pytest.raises(TargetError, match="gemv: needs 65536 workgroups in y, roomy has 65535"):
        check_grid("gemv", (1, 65536, 0), ROOMY)


def test_target_of_tvm_says_the_same_as_the_profile():
    """What is lost on the way through TVM would be checked nowhere."""
    seen = profile_of(target())
    assert seen.features == PROFILE.features
    assert (seen.threads, seen.shared_bytes) == (PROFILE.threads, PROFILE.shared_bytes)
    assert seen.push_bytes == PROFILE.push_bytes
