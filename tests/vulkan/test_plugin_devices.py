"""Devices as they come and go: listed, refused by name, lost, forked, absent (F26, F28, F30)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from k3tvm._ffi import tvm_ffi
from k3tvm.errors import DeviceError
from k3tvm.vulkan import plugin
from tests.vulkan.faults import loader
from tests.vulkan.rig import ROOT, function, in_process, rig

# Prints what a user would be told.
TOLD = """
import sys
from k3tvm.errors import DeviceError
try:
    {0}
except DeviceError as error:
    sys.stdout.write(f"{{type(error).__name__}}: {{error}}")
"""
USE = "import numpy as np; from tests.vulkan.rig import mix, rig, spin, function\n"
PUT = USE + "    rig({0}).memory.put(np.zeros(64, 'uint32'))"


@pytest.fixture
def faulty(tmp_path_factory):
    path = str(loader(tmp_path_factory))
    return lambda code, faults, **more: in_process(
        code, K3TVM_VULKAN_LOADER=path, FAULTS=faults, **more
    )


def told(done) -> str:
    assert done.returncode == 0, done.stderr
    assert "\n" not in done.stdout
    return done.stdout


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
from tests.vulkan.rig import function, plugin, tvm_ffi
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
from tests.vulkan.rig import function, mix, rig
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
from tests.vulkan.rig import mix, rig
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
from tests.vulkan.rig import function, mix, rig, tvm_ffi
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


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"K3TVM_VULKAN_LOADER": "/nowhere/libvulkan.so"}, "no Vulkan loader on this system"),
        ({"K3TVM_VULKAN_LOADER": "libc.so.6"}, "libc.so.6 is no Vulkan loader"),
        ({"VK_DRIVER_FILES": "/nowhere", "VK_ICD_FILENAMES": "/nowhere"}, "no Vulkan driver"),
        ({"K3TVM_VULKAN_VALIDATION": "1", "VK_LAYER_PATH": "/nowhere"}, "is not installed"),
    ],
)
def test_a_machine_without_vulkan_is_told_why(environment, reason):
    for code in (PUT.format(0), "from tests.vulkan.rig import *\n    rig(); function('devices')()"):
        assert reason in told(in_process(TOLD.format(code), **environment))


def test_kernels_can_be_compiled_without_a_loader():
    code = """
import sys
from tests.vulkan.rig import mix, plugin, load_kernel
plugin.load()
sys.stdout.write(str(load_kernel(mix()) is not None))
"""
    assert told(in_process(code, K3TVM_VULKAN_LOADER="/nowhere/libvulkan.so")) == "True"


@pytest.mark.parametrize("end", ["", "os._exit(0)", "sys.exit(3)", "raise SystemExit(0)"])
def test_a_process_ends_in_the_middle_of_work(end):
    """Static objects of driver, TVM and plug-in go in an order that nobody chooses."""
    code = f"""
import os, sys
import numpy as np
from tests.vulkan.rig import mix, rig, spin
x = rig().memory.put(np.zeros(4096, "uint32"))
rig().run(spin(), x, x, 1, 20000)
rig().run(mix(), x, x, 1, 64)
{end}
"""
    done = in_process(code)
    assert (done.returncode, done.stderr) == (3 if "3" in end else 0, "")


def test_a_forked_child_is_told_and_does_not_hang():
    code = """
import os, sys
import numpy as np
from tests.vulkan.rig import rig
x = rig().memory.put(np.zeros(64, "uint32"))
child = os.fork()
if not child:
    try:
        rig().sync()
    except Exception as error:
        del x
        os._exit(7 if "fork()" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
sys.stdout.write(str(rig().memory.get(x).sum()))
"""
    assert told(in_process(code)) == "0"


def cache_file(folder: Path) -> Path:
    (found,) = (folder / "vulkan").iterdir()
    return found


def test_compiled_kernels_are_kept_on_disk(tmp_path):
    code = USE + "x = rig().memory.put(np.zeros(64, 'uint32')); rig().run(mix(), x, x, 1, 64)"
    environment = {"K3TVM_CACHE": str(tmp_path)}
    rig_of = os.environ.get("K3TVM_CACHE")
    assert told(in_process(code, **environment)) == ""
    whole = cache_file(tmp_path).read_bytes()
    assert whole.startswith(b"K3PC") and len(whole) >= 16 + 32
    for damaged in (b"", whole[:20], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"x" * 400):
        cache_file(tmp_path).write_bytes(damaged)
        assert told(in_process(code, **environment)) == ""
        assert cache_file(tmp_path).read_bytes() == whole
    assert rig_of == os.environ.get("K3TVM_CACHE")


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    code = USE + "x = rig().memory.put(np.zeros(64, 'uint32')); rig().run(mix(), x, x, 1, 64)"
    for folder in (str(tmp_path / "file"), "/proc/nowhere"):
        assert told(in_process(code, K3TVM_CACHE=folder)) == ""


def test_the_plugin_is_found_from_any_directory(tmp_path):
    code = USE + "import sys; sys.stdout.write(str(rig().stats()['dispatches']))"
    assert told(in_process(code, cwd=str(tmp_path))) == "0"


def test_loading_brings_neither_compiler_nor_driver_tools():
    code = """
import sys
from k3tvm.vulkan import plugin
plugin.load()
maps = open("/proc/self/maps").read()
sys.stdout.write(" ".join(n for n in ("libtvm_compiler", "libvulkan.so", "glslang") if n in maps))
sys.stdout.write(" ".join(n for n in ("tvm", "torch") if n in sys.modules))
"""
    assert told(in_process(code)) == ""


def test_a_library_for_another_tvm_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    other = tmp_path / "libk3tvm_vulkan.so"
    other.write_bytes(plugin.LIBRARY.read_bytes().replace(b"0.27.0.post1", b"0.26.0.post1"))
    with pytest.raises(DeviceError, match="was built for .*0.26.0.*here is .*0.27.0.*--build"):
        plugin._check(other)
    other.write_bytes(b"no library")
    with pytest.raises(DeviceError, match="built for something else"):
        plugin._check(other)
    with pytest.raises(DeviceError, match="was not built.*apt install libvulkan-dev"):
        plugin._check(tmp_path / "absent.so")


OWN = """
import sys
from k3tvm._ffi import tvm_ffi
tvm_ffi.register_global_func("device_api.vulkan", lambda: None)
from k3tvm.errors import DeviceError
from k3tvm.vulkan import autoload, plugin
autoload()
sys.stdout.write(plugin.provider() + " ")
try:
    plugin.load()
except DeviceError as error:
    sys.stdout.write(str(error))
sys.stdout.write(" " + plugin.provider())
"""


def test_a_tvm_with_its_own_vulkan_is_left_alone_unless_the_user_prefers_ours():
    said = told(in_process(OWN))
    assert said.startswith("TVM ") and said.endswith(" TVM")
    assert "K3TVM_VULKAN=own" in said
    assert told(in_process(OWN, K3TVM_VULKAN="own")) == "k3tvm  k3tvm"


def test_the_plugin_says_what_it_was_built_for():
    rig()
    assert function("abi")() == plugin.ABI == plugin.built_for(plugin.LIBRARY)
    assert ROOT in plugin.LIBRARY.parents
