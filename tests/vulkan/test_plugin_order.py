"""Order: kernels, copies and fills see each other's results, barriers stand where they must.

lavapipe runs commands one after the other, so a missing barrier gives right numbers there; hence
barriers are counted, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm._ffi import tvm_ffi
from tests.vulkan.faults import loader
from tests.vulkan.programs import Program, in_threads
from tests.vulkan.rig import Rig, function, in_process, mix, rig, spin

MIB = 1 << 20
PROGRAM = "import sys; from tests.vulkan.programs import main; sys.exit(main({0}, 500, {1}))"
N = 256


@pytest.fixture
def device() -> Rig:
    rig().sync()
    return rig()


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_agree_with_numpy_in_every_bit(device, seed):
    assert Program(device, seed).run(400) == 0


SETTINGS = {
    "validated": {"K3TVM_VULKAN_VALIDATION": "1"},
    "staged": {"K3TVM_VULKAN_VALIDATION": "1", "K3TVM_VULKAN_STAGING": "1"},
    "discrete": {"K3TVM_VULKAN_VALIDATION": "1", "FAULTS": "discrete"},
    "second": {"K3TVM_VULKAN_VALIDATION": "1", "FAULTS": "two"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_programs_agree_and_the_validation_layer_is_silent(setting, tmp_path_factory):
    environment = SETTINGS[setting] | {"K3TVM_VULKAN_LOADER": str(loader(tmp_path_factory))}
    done = in_process(PROGRAM.format(7, int(setting == "second")), **environment)
    assert (done.returncode, done.stdout) == (0, "0 tensors differ, 0 messages\n"), done.stderr


def test_two_threads_work_on_one_device_at_the_same_time(device):
    assert in_threads([Program(device, seed) for seed in (11, 12, 13)], 300) == [0, 0, 0]


def test_independent_kernels_need_no_barrier_dependent_ones_do(device):
    x, *ys = (device.memory.put(words(N, s)) for s in range(9))
    before = device.stats()["barriers"]
    for y in ys:  # all read x, each writes its own
        device.run(mix(), x, y, 1, N)
    assert device.stats()["barriers"] == before


def barriers(device: Rig, *steps) -> int:
    """Barriers among steps on four tensors, beginning behind a barrier that tensor 0 needed."""
    tensors = [device.memory.put(words(N, s)) for s in range(4)]
    device.run(mix(), tensors[0], tensors[0], 1, N)
    device.run(mix(), tensors[0], tensors[0], 1, N)  # waits for the one before: a barrier
    before = device.stats()["barriers"]
    for step in steps:
        step(*tensors)
    return device.stats()["barriers"] - before


def run(x: int, y: int):
    return lambda *t: rig().run(mix(), t[x], t[y], 1, N)


def copy(source: int, target: int):
    return lambda *t: function("copy")(t[target], 0, t[source], 0, 4 * N)


def fill(target: int):
    return lambda *t: function("fill")(t[target], 0, 4 * N, 1)


ORDERS = {
    "write, then read": ([run(1, 2), run(2, 1)], 1),
    "read, then write": ([run(1, 2), fill(1)], 1),
    "write, then write": ([fill(1), fill(1)], 1),
    "read twice": ([copy(1, 2), run(1, 3)], 0),
    "fill, then kernel": ([fill(1), run(1, 2)], 1),
    "kernel, then copy": ([run(1, 2), copy(2, 1)], 1),
    "one barrier for many": ([fill(1), fill(2), run(1, 2), run(1, 1)], 2),
    "nothing shared": ([fill(1), fill(2)], 0),
}


@pytest.mark.parametrize("name", ORDERS)
def test_barriers_stand_between_uses_that_conflict_and_only_there(device, name):
    steps, want = ORDERS[name]
    assert barriers(device, *steps) == want


def test_work_is_submitted_while_the_host_records(device):
    x, y = device.memory.put(words(N)), device.memory.put(words(N, 1))
    before = device.stats()
    for _ in range(1000):
        device.run(mix(), x, y, 1, N)
    after = device.stats()
    assert after["dispatches"] == before["dispatches"] + 1000
    assert 3 <= after["submissions"] - before["submissions"] <= 63


def test_a_tensor_in_use_can_be_overwritten_by_the_host(device):
    """The kernel reads the old values, whenever the new ones arrive."""
    x, y = device.memory.put(words(4096)), device.memory.put(words(4096, 1))
    busy = device.memory.put(words(4096, 2))
    device.run(spin(), busy, busy, 1, 20000)
    device.run(mix(), x, y, 5, 4096)
    write_without_waiting(x, words(4096, 3))
    want = 3 * words(4096, 1) + words(4096) + np.uint32(5)
    assert np.array_equal(device.memory.get(y), want)
    assert np.array_equal(device.memory.get(x), words(4096, 3))


def write_without_waiting(tensor, values) -> None:
    """A copy that does not end with a wait, as TVM's copies of bytes do."""
    host = tvm_ffi.from_dlpack(np.ascontiguousarray(values))
    tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")(host, tensor)


def test_copies_larger_than_the_rings_arrive_whole():
    """40 MiB and a bit each way through rings of 16, with a kernel in between."""
    code = f"""
import numpy as np
from tests.vulkan.rig import mix, rig, spin
n = {10 * MIB} + 37
values = np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32)
device = rig()
x, y = device.memory.put(values), device.memory.put(values[::-1].copy())
device.call(mix())(x, y, 9, n, 60000, 64)
device.memory.write(x, values[::-1].copy())
m = 60000 * 64
want = values[::-1].copy()
want[:m] = 3 * want[:m] + values[:m] + np.uint32(9)
assert np.array_equal(device.memory.get(y), want)
assert np.array_equal(device.memory.get(x), values[::-1])
"""
    done = in_process(code, K3TVM_VULKAN_STAGING="1")
    assert done.returncode == 0, done.stderr


def test_tensors_are_copied_between_two_devices(tmp_path_factory):
    code = """
import numpy as np
from tests.vulkan.rig import mix, rig, tvm_ffi
one, two = rig(0), rig(1)
values = np.arange(5_000_000, dtype=np.uint32)
x, y = one.memory.put(values), two.memory.empty(values.shape, "uint32")
one.call(mix())(x, x, 1, 64, 1, 64)
tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")(x, y)
two.call(mix())(y, y, 1, 64, 1, 64)
values[:64] = 4 * (4 * values[:64] + 1) + 1
assert np.array_equal(two.memory.get(y), values)
assert [d.stats()["dispatches"] for d in (one, two)] == [1, 1]
try:
    two.call(mix())(x, y, 1, 64, 1, 64)
except Exception as error:
    assert "kernel mix: pointer 0 of 2 is not in memory of vulkan:1" in str(error), error
else:
    raise AssertionError("a tensor of another device was taken")
"""
    environment = {"FAULTS": "two", "K3TVM_VULKAN_LOADER": str(loader(tmp_path_factory))}
    done = in_process(code, **environment)
    assert done.returncode == 0, done.stderr


def test_the_program_says_when_something_differs(device):
    """The comparison itself can fail: a mirror that was changed is noticed."""
    program = Program(device, 1)
    program.run(20)
    program.mirrors[0] = program.mirrors[0] + np.uint32(1)
    assert not program.same(0)
