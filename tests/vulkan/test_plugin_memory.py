"""Device memory: shared blocks, frees while in use, refusals with numbers (F22, F29)."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator

import numpy as np
import pytest

from k3tvm._ffi import tvm_ffi
from k3tvm.errors import DeviceError
from tests.vulkan.rig import Rig, function, in_process, mix, rig, spin, told

MIB = 1 << 20
RANDOM = np.random.default_rng(0)


@pytest.fixture
def device() -> Iterator[Rig]:
    gc.collect()
    rig().sync()
    yield rig()
    function("set_memory_limit")(0, 0)


def numbers(n: int) -> np.ndarray:
    return RANDOM.integers(0, 2**32, n, dtype=np.uint32)


def test_thousands_of_small_tensors_share_few_blocks(device):
    """Drivers allow a few thousand allocations in all (maxMemoryAllocationCount)."""
    before = device.stats()
    values = [numbers(1 + i % 300) for i in range(3000)]
    tensors = [device.memory.put(v) for v in values]
    inside = device.stats()
    assert inside["allocations"] == before["allocations"] + 3000
    assert inside["blocks"] <= before["blocks"] + 1
    for i in range(0, 3000, 7):  # holes, then fresh tensors in them
        tensors[i] = device.memory.put(values[i])
    assert all(
        np.array_equal(device.memory.get(t), v) for t, v in zip(tensors, values, strict=True)
    )
    del tensors
    after = device.stats()
    assert after["used_bytes"] == before["used_bytes"]
    assert after["peak_bytes"] >= inside["used_bytes"]


def test_every_allocation_is_aligned_and_apart(device):
    tensors = [device.memory.empty((n,), "uint8") for n in (1, 255, 256, 257, 1000, 3)]
    spans = sorted((t.data_ptr(), t.shape[0]) for t in tensors)
    assert all(address % 256 == 0 for address, _ in spans)
    assert all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))


def test_a_large_tensor_has_its_own_block_which_goes_back(device):
    before = device.stats()
    tensor = device.memory.empty((100 * MIB,), "uint8")
    assert device.stats()["blocks"] == before["blocks"] + 1
    del tensor
    assert device.stats()["blocks"] == before["blocks"]
    assert device.stats()["block_bytes"] == before["block_bytes"]


def test_memory_freed_while_a_kernel_uses_it_is_not_given_away(device):
    """The tensor is dropped with the kernel in flight; fresh tensors must not land in it."""
    x, y = device.memory.put(numbers(4096)), device.memory.put(numbers(4096))
    device.run(spin(), x, y, 7, 20000)
    lost = y.shape[0] * 4
    del y
    assert device.stats()["waiting_frees"] == 1
    others = [device.memory.put(v) for v in [numbers(4096)] * 8]
    want = [device.memory.get(t) for t in others]
    device.sync()
    assert all(np.array_equal(device.memory.get(t), w) for t, w in zip(others, want, strict=True))
    assert device.stats()["waiting_frees"] == 0
    assert lost == 16384


def test_an_allocation_above_the_devices_largest_is_refused_with_the_numbers(device):
    with pytest.raises(DeviceError, match=r"asked for 4398046511104 bytes.*at most \d+.*available"):
        device.memory.empty((1 << 42,), "uint8")
    assert device.memory.get(device.memory.put(numbers(3))).shape == (3,)


def test_a_full_device_says_asked_used_and_available_and_goes_on(device):
    used = device.stats()["used_bytes"]
    function("set_memory_limit")(0, device.stats()["block_bytes"] + 80 * MIB)
    kept = device.memory.empty((70 * MIB,), "uint8")
    with pytest.raises(DeviceError) as refusal:
        device.memory.empty((160 * MIB,), "uint8")
    text = str(refusal.value)
    said = re.search(r"asked for (\d+) bytes, (\d+) in use, (\d+) available", text)
    assert said and int(said[1]) == 160 * MIB
    assert int(said[2]) == used + 70 * MIB
    assert int(said[3]) < 80 * MIB
    assert "\n" not in text
    del kept
    device.memory.empty((60 * MIB,), "uint8")


def test_memory_of_work_in_flight_is_waited_for_before_refusing(device):
    x = device.memory.put(numbers(4096))
    function("set_memory_limit")(0, device.stats()["block_bytes"] + 80 * MIB)
    big = device.memory.empty((70 * MIB // 4,), "uint32")
    device.call(spin())(x, big, 7, 20000, 64, 64)
    del big
    assert device.memory.empty((70 * MIB,), "uint8").shape == (70 * MIB,)


def test_budget_in_use_and_available_agree(device):
    stats = device.stats()
    assert stats["budget_bytes"] == pytest.approx(
        stats["block_bytes"] + stats["available_bytes"], rel=0.05
    )


def test_kernels_take_addresses_inside_tensors(device):
    x, y = numbers(1000), numbers(1000)
    on_x, on_y = device.memory.put(x), device.memory.put(y)
    part_x = device.memory.view(on_x, 300, "uint32", 400)
    part_y = device.memory.view(on_y, 300, "uint32", 2004)
    device.run(mix(), part_x, part_y, 9, 300)
    y[501:801] = 3 * y[501:801] + x[100:400] + np.uint32(9)
    assert np.array_equal(device.memory.get(on_y), y)


def test_addresses_that_are_not_the_devices_are_refused(device):
    x, y = device.memory.put(numbers(64)), device.memory.put(numbers(64))
    freed = x.data_ptr()
    device.run(spin(), x, y, 1, 20000)
    del x  # while the device still reads it
    for address in (None, 0, 4096, freed, y.data_ptr() + 2**40):
        pointer = ctypes.c_void_p(address)
        with pytest.raises(DeviceError, match=r"kernel mix: pointer 0 of 2 is not in memory of"):
            device.call(mix())(pointer, y, 0, 64, 1, 64)


@pytest.mark.parametrize(("offset", "size"), [(4, 256), (-4, 8), (0, -4), (1 << 62, 1 << 62)])
def test_fills_beyond_a_tensor_are_refused(device, offset, size):
    tensor = device.memory.put(numbers(64))
    with pytest.raises(DeviceError, match="of a tensor of 256"):
        function("fill")(tensor, offset, size, 0)


@pytest.mark.parametrize(("offset", "size"), [(2, 8), (0, 6)])
def test_fills_of_less_than_four_bytes_are_refused(device, offset, size):
    with pytest.raises(DeviceError, match="multiples of four"):
        function("fill")(device.memory.put(numbers(64)), offset, size, 0)


def test_copies_that_overlap_are_refused(device):
    tensor = device.memory.put(numbers(64))
    with pytest.raises(DeviceError, match="overlap"):
        function("copy")(tensor, 0, tensor, 4, 128)


def test_tensors_of_the_host_are_refused():
    host = tvm_ffi.from_dlpack(np.zeros(4, "uint32"))
    with pytest.raises(DeviceError, match="not in a Vulkan device's memory"):
        function("fill")(host, 0, 4, 0)


def test_f29_buffers_for_copies_keep_to_the_limit_too():
    """A process of its own: where they have been made already, they stay."""
    code = """
import json, sys
import numpy as np
from k3tvm.errors import DeviceError
from tests.vulkan.rig import function, rig
device = rig()
function("set_memory_limit")(0, 8 << 20)
try:
    tensor = device.memory.put(np.zeros(4096, "uint32"))
    device.memory.get(tensor)
    sys.stdout.write("copied")
except DeviceError as error:
    sys.stdout.write(f"{error}")
assert device.stats()["block_bytes"] <= 8 << 20
"""
    said = told(in_process(code, K3TVM_VULKAN_STAGING="1"))
    assert re.search(r"asked for 16777216 bytes, 16384 in use, \d+ available of 8388608 ", said)
