"""Devices: listed, refused by name or for what they lack, lost, several at once (F25, F26)."""

from __future__ import annotations

import json

import pytest

from k3tvm._ffi import tvm_ffi
from k3tvm.errors import DeviceError
from k3tvm.vulkan import plugin
from tests.vulkan.faults import loader
from tests.vulkan.rig import PUT, TOLD, USE, function, in_process, rig, told


@pytest.fixture
def faulty(tmp_path_factory):
    path = str(loader(tmp_path_factory))
    return lambda code, faults, **more: in_process(
        code, K3TVM_VULKAN_LOADER=path, FAULTS=faults, **more
    )


def test_every_device_is_described(tmp_path):
    plugin.load()
    for facts in json.loads(function("devices")()):
        assert facts["usable"] or facts["why_not"]
        assert facts["limits"]["push_bytes"] >= 128
        assert facts["limits"]["max_grid"][0] >= 65535
        assert facts["subgroup"] > 0 and facts["features"]
        assert len(facts["uuid"]) == 32
        assert all(heap["budget_bytes"] <= heap["bytes"] for heap in facts["heaps"])


def test_tvm_is_told_a_warp_of_one_and_every_property_of_its_target():
    rig()
    ask = tvm_ffi.get_global_func("device_api.vulkan.get_target_property")
    from k3tvm._tvm import tvm

    options = tvm_ffi.get_global_func("target.ListTargetKindOptionsFromName")("vulkan")
    general = {"kind", "keys", "tag", "device", "model", "libs", "host", "from_device"}
    names = {str(n) for n in options} - general - {"target_device_type"}
    device = tvm.device("vulkan", 0)
    assert {n for n in names if ask(device, n) is None} == set()
    assert ask(device, "thread_warp_size") == device.warp_size == 1
    assert ask(device, "no such property") is None
    assert tvm.target.Target({"kind": "vulkan", "from_device": 0}).attrs["thread_warp_size"] == 1


@pytest.mark.parametrize("index", [1, 7, -1])
def test_a_device_that_is_not_there_is_refused_with_what_there_is(index):
    rig()
    with pytest.raises(DeviceError, match=rf"vulkan:{index} is not available: there is vulkan:0"):
        function("stats")(index)
    attribute = tvm_ffi.get_global_func("runtime.GetDeviceAttr")
    assert attribute(7, index, 0) == 0
    assert attribute(7, 0, 0) == 1


@pytest.mark.parametrize(
    ("faults", "reason"),
    [("old", "has Vulkan 1.1.0, 1.2 is needed"), ("no_address", "lacks bufferDeviceAddress")],
)
def test_a_device_that_lacks_what_kernels_need_is_listed_and_refused(faulty, faults, reason):
    assert reason in told(faulty(TOLD.format(PUT.format(0)), faults))
    listing = """
import json, sys
from tests.vulkan.rig import function, mix, plugin, rig, tvm_ffi
plugin.load()
facts = json.loads(function("devices")())[0]
exists = tvm_ffi.get_global_func("runtime.GetDeviceAttr")(7, 0, 0)
sys.stdout.write(f"{facts['usable']} {exists} {facts['why_not']}")
"""
    assert told(faulty(listing, faults)).startswith(f"False 0 {reason.split(',')[0]}")


def test_a_kernel_that_needs_a_feature_is_refused_where_it_is_missing(faulty):
    code = USE + (
        "    from tests.vulkan.rig import changed, load_kernel\n"
        "    x = rig().memory.put(np.zeros(64, 'uint32'))\n"
        "    half = changed(mix(), features=frozenset({'float16'}))\n"
        "    load_kernel(half)(x, x, 1, 64, 1, 64)"
    )
    assert told(faulty(TOLD.format(code), "")) == ""
    assert "kernel mix needs float16, which vulkan:0" in told(
        faulty(TOLD.format(code), "no_float16")
    )


def test_timing_without_timestamps_is_an_error_that_says_so(faulty):
    code = TOLD.format(USE + "    rig(); function('profile_start')(0)")
    assert "has no timestamps" in told(faulty(code, "no_timestamps"))


def test_a_driver_without_memory_is_an_error_with_the_numbers(faulty):
    said = told(faulty(TOLD.format(PUT.format(0)), "full"))
    assert "out of memory: asked for 256 bytes, 0 in use" in said


LOSE = """
import gc, sys
import numpy as np
from k3tvm.errors import DeviceError
from tests.vulkan.rig import function, mix, plugin, rig, tvm_ffi
device = rig()
x = device.memory.put(np.zeros(64, "uint32"))
def lost(action):
    try:
        action()
    except DeviceError as error:
        assert "the device was lost" in str(error) and "vulkan:0" in str(error), error
        return True
    return False
assert not lost(lambda: device.memory.get(x))
device.run(mix(), x, x, 1, 64)
device.sync()
device.run(mix(), x, x, 1, 64)
actions = [device.sync, lambda: device.memory.get(x), lambda: device.memory.empty((4,), "uint8"),
           lambda: device.run(mix(), x, x, 1, 64), lambda: function("stats")(0), device.sync]
assert all(lost(action) for action in actions)
del x
gc.collect()
sys.stdout.write("told every time")
"""


def test_a_lost_device_says_so_from_then_on_and_nothing_crashes(faulty):
    assert told(faulty(LOSE, "lost=2")) == "told every time"


def test_a_second_device_works_when_the_first_is_lost(faulty):
    code = """
import sys
import numpy as np
from tests.vulkan.rig import function, mix, plugin, rig, tvm_ffi
one, two = rig(0), rig(1)
x, y = (d.memory.put(np.ones(64, "uint32")) for d in (one, two))
two.run(mix(), y, y, 1, 64)
two.sync()
one.run(mix(), x, x, 1, 64)
try:
    one.sync()
except Exception as error:
    assert "vulkan:0" in str(error)
sys.stdout.write(str(two.memory.get(y)[0]))
"""
    assert told(faulty(code, "two lost=2")) == "5"


def test_kernels_run_on_the_device_that_tvm_set_in_this_thread(faulty):
    code = """
import ctypes, sys, threading
import numpy as np
from tests.vulkan.rig import function, mix, plugin, rig, tvm_ffi
one, two = rig(0), rig(1)
y = two.memory.put(np.ones(64, "uint32"))
address = ctypes.c_void_p(y.data_ptr())
set_device = tvm_ffi.get_global_func("__tvm_set_device")
def elsewhere():
    set_device(7, 1)
    two.call(mix())(address, address, 1, 64, 1, 64)
threads = [threading.Thread(target=elsewhere) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert one.stats()["dispatches"] == 0
sys.stdout.write(str(two.memory.get(y)[0]))
"""
    want = 1
    for _ in range(4):
        want = 4 * want + 1
    assert told(faulty(code, "two")) == str(want)
