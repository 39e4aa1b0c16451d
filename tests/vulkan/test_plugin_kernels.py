"""Kernels: arguments of every kind, limits that name kernel, need and limit (F25), timing."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from k3tvm.errors import DeviceError
from k3tvm.vulkan.module import write_module
from tests.vulkan.rig import changed, function, kernel, load_kernel, mix, rig, spin

# kind -> GLSL type, value, and the value as float64
SCALARS = {
    "b": ("int", True, 1.0),
    "c": ("int8_t", -100, -100.0),
    "C": ("uint8_t", 200, 200.0),
    "w": ("int16_t", -30000, -30000.0),
    "W": ("uint16_t", 60000, 60000.0),
    "i": ("int", -(2**31), -(2.0**31)),
    "I": ("uint", 2**32 - 1, 2.0**32 - 1),
    "l": ("int64_t", -(2**52), -(2.0**52)),
    "L": ("uint64_t", 2**52 + 1, 2.0**52 + 1),
    "h": ("float16_t", 0.333251953125, 0.333251953125),
    "f": ("float", 0.1, float(np.float32(0.1))),
    "d": ("double", 0.1, 0.1),
}


def reader(kinds: str, block: bool):
    """A kernel that writes its scalars as float64 into its first argument."""
    at = "a." if block else ""
    members = "D out_; " + " ".join(f"{SCALARS[k][0]} m{i};" for i, k in enumerate(kinds))
    lines = [f"{at}out_.d[{i}] = double({at}m{i});" for i in range(len(kinds))]
    body = "if (i == 0) { " + " ".join(lines) + " }"
    return kernel(f"reader{'_block' * block}", "P" + kinds, members, body, block)


def read_back(kinds: str, block: bool, values) -> list[float]:
    out = rig().memory.put(np.zeros(len(kinds)))
    load_kernel(reader(kinds, block))(out, *values, 1, 64)
    return rig().memory.get(out).tolist()


@pytest.mark.parametrize("block", [False, True], ids=["pushed", "block"])
@pytest.mark.parametrize("order", ["".join(SCALARS), "".join(reversed(SCALARS)), "chcfcdcwcl"])
def test_scalars_of_every_kind_arrive_each_at_its_own_alignment(order, block):
    got = read_back(order, block, [SCALARS[k][1] for k in order])
    assert got == [SCALARS[k][2] for k in order]


HALVES = [0.0, -0.0, 1.0, -2.5, 65504.0, 65519.9, 65520.0, 1e9, -1e9, 6e-8, 3e-8, 2.9e-8, 5.96e-8]
HALVES += [6.1e-5, 6.103e-5, 2049.0, 2051.0, 0.1, 1 / 3, float("inf"), -1e-30]


def test_float16_arguments_round_as_numpy_does():
    got = read_back("h" * 20, True, HALVES[:20])
    with np.errstate(over="ignore"):
        want = np.float32(HALVES[:20]).astype("float16").astype("float64")
    assert got == want.tolist()


def test_more_arguments_than_are_pushed_travel_in_a_block():
    """Thirty tensors are 240 bytes; devices must push only 128."""
    n = 30
    # Two words each: glslang would give the load of an address its target's alignment.
    members = " ".join(f"uvec2 t{i};" for i in range(n)) + " int n;"
    total = " + ".join(f"U(a.t{i}).d[i]" for i in range(n - 1))
    body = f"if (i < a.n) U(a.t29).d[i] = {total};"
    info = kernel("many", "p" * 29 + "Pi", members, body, True)
    values = np.random.default_rng(1).integers(0, 2**32, (n, 100), dtype=np.uint32)
    tensors = [rig().memory.put(v) for v in values]
    for _ in range(5000):  # the ring of blocks goes round more than once
        load_kernel(info)(*tensors, 100, 2, 64)
    assert np.array_equal(rig().memory.get(tensors[-1]), values[:-1].sum(0, dtype=np.uint32))


HUGE = 1 << 20
LIMITS = {
    "threads in a workgroup": {"local_size": (1024, 64, 1)},
    "cooperative_matrix, which": {"features": frozenset({"float16", "cooperative_matrix"})},
    "bytes of shared memory": {"shared_bytes": HUGE},
    "bytes of push constants": {"kinds": "p" * 500},
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_kernel_beyond_the_device_is_refused_by_name(what):
    info = changed(mix(), name=f"big_{what.split()[0]}", **LIMITS[what])
    tensor = rig().memory.put(np.zeros(64, "uint32"))
    arguments = [tensor] * 500 if len(info.kinds) == 500 else [tensor, tensor, 0, 64]
    with pytest.raises(DeviceError, match=f"kernel {info.name} needs .*{what}.* vulkan:0") as error:
        load_kernel(info)(*arguments, 1, info.local_size[0])
    assert "compile the model for this device's profile" in str(error.value)


@pytest.mark.parametrize("groups", [65536, 2**32 + 1, -1])
def test_a_grid_beyond_the_device_is_refused_with_need_and_limit(groups):
    tensor = rig().memory.put(np.zeros(64, "uint32"))
    with pytest.raises(DeviceError, match=f"kernel mix was launched with {groups} workgroups"):
        load_kernel(mix())(tensor, tensor, 0, 64, groups, 64)


def test_an_empty_grid_does_nothing():
    before = rig().stats()["dispatches"]
    tensor = rig().memory.put(np.zeros(64, "uint32"))
    load_kernel(mix())(tensor, tensor, 1, 64, 0, 64)
    assert rig().stats()["dispatches"] == before
    assert not rig().memory.get(tensor).any()


def test_a_workgroup_of_another_size_is_refused():
    tensor = rig().memory.put(np.zeros(64, "uint32"))
    with pytest.raises(DeviceError, match="launched with 32 threads in dimension x.*for 64"):
        load_kernel(mix())(tensor, tensor, 0, 64, 1, 32)


def test_a_wrong_number_of_arguments_is_refused():
    with pytest.raises(DeviceError, match="kernel mix takes 6 arguments, got 2"):
        load_kernel(mix())(1, 64)


def test_damaged_modules_are_refused_wherever_they_are_cut():
    blob = write_module([changed(mix(), source="")])
    create = function("create_module")
    assert create(blob)["mix"] is not None
    ends = [*range(0, 90), *range(90, len(blob), 97)]
    for end in ends:
        with pytest.raises(DeviceError, match="damaged at byte|compile it again"):
            create(blob[:end])
    for at, value in product([0, 4, 8], [0, 255]):
        with pytest.raises(DeviceError, match="compile it again"):
            create(blob[:at] + bytes([value]) + blob[at + 1 :])
    with pytest.raises(DeviceError, match="more bytes"):
        create(blob + b"\0")


def test_a_module_of_another_format_is_refused_with_both_versions():
    blob = bytearray(write_module([mix()]))
    blob[4] = 2
    with pytest.raises(DeviceError, match="format 2, this plug-in reads 1"):
        function("create_module")(bytes(blob))


def test_functions_outlive_their_module():
    run = load_kernel(changed(mix(), name="late"))  # its module is gone already
    x, y = (rig().memory.put(np.full(64, v, "uint32")) for v in (5, 7))
    run(x, y, 1, 64, 1, 64)
    assert rig().memory.get(y).tolist() == [27] * 64


def test_a_kernel_dropped_while_it_runs_runs_to_its_end():
    x, y = (rig().memory.put(np.full(4096, v, "uint32")) for v in (1, 1))
    run = function("create_module")(write_module([changed(spin(), name="dropped")]))["dropped"]
    run(x, y, 0, 3000, 64, 64)
    del run
    want = pow(3, 3000, 2**32)
    assert rig().memory.get(y).tolist() == [want] * 4096


def test_kernels_are_timed_on_the_device_in_order():
    device = rig()
    x, y = (device.memory.put(np.zeros(64 * 1024, "uint32")) for _ in range(2))
    device.run(spin(), x, y, 1, 1)
    function("profile_start")(0)
    for _ in range(1500):  # more than one pool of queries
        device.run(mix(), x, y, 1, 64)
    for turns in (10, 3000):
        device.run(spin(), x, y, 1, turns)
    times = json.loads(function("profile_stop")(0))
    assert [name for name, _ in times] == ["mix"] * 1500 + ["spin"] * 2
    assert all(0 <= t < 10**10 for _, t in times)
    assert times[-1][1] > 3 * times[-2][1] > 0


def test_timing_is_started_and_stopped_once():
    with pytest.raises(DeviceError, match="not being timed"):
        function("profile_stop")(0)
    function("profile_start")(0)
    with pytest.raises(DeviceError, match="timed already"):
        function("profile_start")(0)
    assert json.loads(function("profile_stop")(0)) == []
