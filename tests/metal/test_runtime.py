"""What TVM's runtime for Metal lacks, and we put together, tried on an emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm import emulate
from k3tvm.metal import runtime
from k3tvm.runtime.device_memory import DeviceMemory


@pytest.fixture
def memory() -> DeviceMemory:
    """Memory of the emulated device through the functions for the real one."""
    emulate.install("metal")
    runtime.register()
    return DeviceMemory(runtime.METAL, 0, runtime.PREFIX)


def test_parts_of_tensors_are_filled_and_copied(memory, monkeypatch):
    monkeypatch.setattr(runtime, "PIECE", 64)  # filled in several pieces
    block = memory.block((100,), "float32")
    assert not block.read(0, 100).any()
    values = np.arange(100, dtype=np.float32)
    block.write(0, values)
    block.clear(10, 40)
    block.copy(60, 20, 9)
    want = values.copy()
    want[10:50] = 0
    want[20:29] = want[60:69]
    np.testing.assert_array_equal(block.read(0, 100), want)
    memory.fill(block.tensor, 4 * 95, 4 * 5, 0x3F800000)
    np.testing.assert_array_equal(block.read(94, 6), [94, 1, 1, 1, 1, 1])


def test_room_is_what_the_device_has(memory):
    assert memory.room() > 0
