"""Target profiles and device selection: the right one or an error, never more than a device has."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3tvm.bundle.manifest import Manifest
from k3tvm.compiler.targets import profile_of
from k3tvm.compiler.targets.vulkan import PROFILES, profile_of_device
from k3tvm.errors import DeviceError, TargetError
from k3tvm.schedules.profile import GpuProfile
from k3tvm.vulkan import devices
from k3tvm.vulkan.devices import Device, KernelNeeds, find, lacks, size
from k3tvm.vulkan.limits import check_kernel
from k3tvm.vulkan.module import KernelInfo
from tests.devices import require
from tests.vulkan.machines import NVIDIA, bundle, device, report

DESKTOP = ("lavapipe", "nvidia", "amd", "intel", "apple")
BASELINE = PROFILES["baseline"]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_has_two_spellings_and_a_target_that_tvm_takes(name: str) -> None:
    from k3tvm._tvm import tvm

    profile = profile_of(f"vulkan:{name}")
    assert isinstance(profile, GpuProfile) and profile.name == f"vulkan-{name}"
    assert profile_of(profile.name) is profile
    target = tvm.target.Target(profile.tvm_target())
    assert target.kind.name == "vulkan" and int(target.attrs["thread_warp_size"]) == 1


def test_vulkan_alone_is_the_baseline() -> None:
    assert profile_of("vulkan") is BASELINE


@pytest.mark.parametrize("name", ["vulkan:radeon", "vulkan:Nvidia", "vulkan:amd:1"])
def test_f26_an_unknown_profile_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(TargetError, match="choose one of: baseline, .*mobile, from-device") as e:
        profile_of(name)
    assert "\n" not in str(e.value)


def test_features_are_added_by_name_and_stand_in_the_profiles_name() -> None:
    """Cooperative matrices are in no profile: they must be asked for."""
    assert all("cooperative_matrix" not in p.features for p in PROFILES.values())
    profile = profile_of("vulkan:nvidia+cooperative_matrix")
    assert profile.name == "vulkan-nvidia+cooperative_matrix"
    assert profile.features == PROFILES["nvidia"].features | {"cooperative_matrix"}
    assert profile_of("vulkan+float64").features == BASELINE.features | {"float64"}
    with pytest.raises(TargetError, match="'tensor_cores' is not known; choose among: float16"):
        profile_of("vulkan:nvidia+tensor_cores")


# --- facts ----------------------------------------------------------------------------------------


def _pairs(a: tuple[int, int, int], b: tuple[int, int, int]) -> list[tuple[int, int]]:
    return list(zip(a, b, strict=True))


def beyond(small: GpuProfile, large: GpuProfile) -> list[str]:
    """In what `small` allows kernels more than `large`."""
    pairs = {
        "threads": (small.threads, large.threads),
        "shared": (small.shared_bytes, large.shared_bytes),
        "push": (small.push_bytes, large.push_bytes),
    }
    pairs |= {f"x{i}": p for i, p in enumerate(_pairs(small.threads_xyz, large.threads_xyz))}
    pairs |= {f"grid{i}": p for i, p in enumerate(_pairs(small.grid, large.grid))}
    return [k for k, (a, b) in pairs.items() if a > b] + sorted(small.features - large.features)


@pytest.mark.parametrize("name", DESKTOP)
def test_a_bundle_for_the_baseline_is_within_every_desktop_profile(name: str) -> None:
    assert beyond(BASELINE, PROFILES[name]) == []


def test_phones_have_less_than_the_baseline() -> None:
    assert beyond(BASELINE, PROFILES["mobile"]) == ["shared", "int64", "subgroup_shuffle"]


@pytest.mark.parametrize("name", PROFILES)
def test_no_profile_is_below_what_vulkan_promises(name: str) -> None:
    promised = GpuProfile("vulkan", "promised", 128, (128, 128, 64), 16384)
    assert beyond(promised, PROFILES[name]) == []


# --- a device of this machine ---------------------------------------------------------------------


def these(monkeypatch: pytest.MonkeyPatch, *found: Device) -> None:
    monkeypatch.setattr(devices, "devices", lambda: found)


def test_from_device_takes_what_the_device_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    features = ["float16", "storage8", "cooperative_matrix", "something_new"]
    small = device(
        1, "Tiny (R) 3-D", max_threads=64, max_threads_dim=[64, 32, 16], shared_bytes=8192,
        push_bytes=4096, subgroup=4, features=features,
    )  # fmt: skip
    these(monkeypatch, device(0), small)
    assert profile_of("vulkan:from-device") == profile_of("vulkan:from-device:0")
    profile = profile_of("vulkan:from-device:1")
    assert isinstance(profile, GpuProfile)
    assert profile.name == "vulkan-tiny-r-3-d"
    assert (profile.threads, profile.threads_xyz) == (64, (64, 32, 16))
    assert (profile.shared_bytes, profile.push_bytes, profile.subgroup) == (8192, 256, 4)
    assert profile.features == {"float16", "storage8"}


def test_f26_from_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    these(monkeypatch)
    with pytest.raises(DeviceError, match="apt install .*mesa-vulkan-drivers"):
        profile_of("vulkan:from-device")
    these(monkeypatch, device(0, "Only One"))
    with pytest.raises(DeviceError, match=r"Vulkan device 3: is not there; .*0 \(Only One\)"):
        profile_of("vulkan:from-device:3")


def test_every_device_of_this_machine_is_read_and_its_profile_fits_itself() -> None:
    require("vulkan")
    found = devices.devices()
    assert [d.index for d in found] == list(range(len(found)))
    for d in found:
        if d.usable:
            profile = profile_of_device(d)
            assert d.memory_bytes > 2**28 and d.threads >= 128 and d.subgroup >= 1
            needs = KernelNeeds(
                profile.threads, profile.threads_xyz, profile.shared_bytes, profile.push_bytes,
                frozenset(profile.features),
            )  # fmt: skip
            assert lacks(d, needs) == []


def test_lavapipe_is_as_its_profile_says() -> None:
    require("vulkan")
    found = [d for d in devices.devices() if d.name.startswith("llvmpipe")]
    if not found:
        pytest.skip("holds lavapipe's profile against its driver; only other drivers are installed")
    assert found[0].kind == "cpu" and found[0].unified
    assert beyond(PROFILES["lavapipe"], profile_of_device(found[0])) == []


# --- choosing a device ----------------------------------------------------------------------------

SOFTWARE = device(0, "llvmpipe (LLVM 15)", type="cpu")
OLD = device(1, "GeForce 9800", usable=False, why_not="has Vulkan 1.1.0, 1.2 is needed")
FIRST = device(2, "GeForce RTX 4090")
SECOND = device(3, "GeForce RTX 4090")
AMD = device(4, "Radeon RX 7900 XTX")
ALL = (SOFTWARE, OLD, FIRST, SECOND, AMD)


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ("", FIRST),
        ("0", SOFTWARE),
        ("3", SECOND),
        ("xtx", AMD),
        ("LLVMPIPE", SOFTWARE),
        (" 4 ", AMD),
    ],
)
def test_a_device_is_chosen_by_number_or_name_and_real_ones_come_first(
    selector: str, wanted: Device
) -> None:
    assert find(selector, ALL) is wanted


def test_software_is_taken_when_nothing_else_is_usable() -> None:
    assert find("", (OLD, SOFTWARE)) is SOFTWARE


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("rtx", "is not one device; use its number; devices here: 0 .*; 3 .GeForce RTX 4090.; 4"),
        ("1", "cannot be used: 1 .GeForce 9800.: has Vulkan 1.1.0, 1.2 is needed"),
        ("force 98", "cannot be used"),
        ("4090", "is not there"),
        ("5", "is not there; devices here: 0 "),
        ("-1", "is not there"),
        ("arc", "is not there"),
    ],
)
def test_f26_no_other_device_than_the_one_asked_for(selector: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        find(selector, ALL)
    assert caught.value.where == f"Vulkan device {selector}"


def test_f26_only_unusable_devices() -> None:
    with pytest.raises(DeviceError, match="Vulkan device: cannot be used: 1 .*1.2 is needed"):
        find("", (OLD,))


def test_the_list_of_the_plugin_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3tvm._ffi import tvm_ffi
    from k3tvm.vulkan import plugin

    text = json.dumps([report(0, "A"), report(1, "B", usable=False, why_not="lacks X")])
    monkeypatch.setattr(plugin, "load", lambda: None)
    monkeypatch.setattr(tvm_ffi, "get_global_func", lambda name: lambda: text)
    found = devices.devices.__wrapped__()
    assert [(d.name, d.usable, d.reason) for d in found] == [
        ("A", True, ""),
        ("B", False, "lacks X"),
    ]
    assert found[0].memory_bytes == 8 << 30 and found[0].driver == "Test 1.2.3"


# --- limits ---------------------------------------------------------------------------------------


def kernel(**changes: Any) -> KernelInfo:
    base = KernelInfo(
        name="kda_chunk", kinds="Ppf", block=False, tags=(0, 3), local_size=(32, 4, 2),
        shared_bytes=12288, features=frozenset({"float16", "storage8"}), source="", spirv=b"",
    )  # fmt: skip
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("limits", "need"),
    [
        ({"threads": 64}, "needs 256 threads in a workgroup, small has 64"),
        ({"threads_xyz": (16, 256, 64)}, "needs 32 threads in x, small has 16"),
        ({"threads_xyz": (256, 256, 1)}, "needs 2 threads in z, small has 1"),
        ({"shared_bytes": 8192}, "needs 12288 bytes of shared memory, small has 8192"),
        ({"features": frozenset({"float16"})}, "needs storage8, which small lacks"),
        ({"features": frozenset()}, "needs float16, storage8, which small lacks"),
    ],
)
def test_f25_a_kernel_beyond_the_profile_is_refused_by_name(
    limits: dict[str, Any], need: str
) -> None:
    check_kernel(kernel(), replace(BASELINE, name="small"))
    with pytest.raises(TargetError) as caught:
        check_kernel(kernel(), replace(BASELINE, name="small", **limits))
    assert str(caught.value).startswith(f"kernel kda_chunk: {need}") and "\n" not in str(
        caught.value
    )


def launch(threads: tuple[int, int, int], shared: int, push: int, *features: str) -> Any:
    return SimpleNamespace(threads=threads, shared_bytes=shared, push_bytes=push, features=features)


NEEDS = KernelNeeds.of(
    [launch((256, 1, 1), 100, 64, "int64"), launch((8, 8, 8), 45056, 8, "storage8", "int64")]
)


def test_needs_are_the_most_that_any_kernel_asks_for() -> None:
    assert KernelNeeds(512, (256, 8, 8), 45056, 64, frozenset({"int64", "storage8"})) == NEEDS
    assert lacks(device(), KernelNeeds.of([])) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"shared_bytes": 32768}, ["12 KiB of shared memory more: needs 44 KiB, has 32 KiB"]),
        ({"push_bytes": 32}, ["32 bytes of push constants more: needs 64 bytes, has 32 bytes"]),
        ({"max_threads": 128}, ["384 threads in a workgroup more: needs 512, has 128"]),
        ({"max_threads_dim": [256, 256, 4]}, ["4 threads in z more: needs 8, has 4"]),
        ({"features": ["int64"]}, ["it has no storage8"]),
        ({"usable": False, "why_not": "lacks timelineSemaphore"}, ["lacks timelineSemaphore"]),
    ],
)
def test_f25_what_a_device_lacks_is_said_before_it_runs(
    changes: dict[str, Any], words: list[str]
) -> None:
    assert lacks(device(**changes), NEEDS) == words


def test_f25_f26_an_engine_is_not_opened_on_a_device_that_cannot_run_the_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line: the device, what it lacks for each library, and what to compile."""
    from k3tvm.runtime.device import open_device

    these(monkeypatch, device(0, "Big"), device(1, "Small", shared_bytes=16384))
    folder = Path(bundle(tmp_path / "b", NVIDIA))
    with pytest.raises(DeviceError) as caught:
        open_device(folder, Manifest.load(folder), "vulkan:small")
    assert str(caught.value) == (
        "vulkan:1 Small: cannot run this bundle: vulkan-nvidia: 28 KiB of shared memory more:"
        " needs 44 KiB, has 16 KiB; compile with --target vulkan:from-device:1"
    )


@cache
def greedy() -> Any:
    """A TIR kernel with 256 threads, 16 KiB of shared memory and 8-bit storage."""
    from k3tvm._tvm import T
    from tests.vulkan import shaders

    def body(x: Any, y: Any) -> None:
        with T.launch_thread("blockIdx.x", 1), T.launch_thread("threadIdx.x", 256) as i:
            shared = T.alloc_buffer((4096,), "float32", scope="shared")
            for start in (0, 3840):
                T.buffer_store(shared, T.Cast("float32", x[i]), [i + start])
            T.evaluate(T.tvm_storage_sync("shared"))
            T.buffer_store(y, shared[4095 - i], [i])

    return shaders.function(body, ((256,), "uint8"), ((256,), "float32"))


@pytest.mark.parametrize(
    ("limits", "need"),
    [
        ({}, ""),
        ({"threads": 128}, "needs 256 threads in a workgroup, small has 128"),
        ({"shared_bytes": 8192}, "needs 16384 bytes of shared memory, small has 8192"),
        ({"features": BASELINE.features - {"storage8"}}, "needs storage8, which small lacks"),
    ],
)
def test_f25_compiling_for_less_than_a_kernel_needs_is_one_error(
    limits: dict[str, Any], need: str
) -> None:
    """Through TVM: the error is ours, typed, and not a traceback of the compiler."""
    from k3tvm._tvm import tvm
    from k3tvm.compiler import lowering

    require("vulkan")
    profile = replace(BASELINE, name="small", **limits)
    target = tvm.target.Target(profile.tvm_target())
    with lowering.device_code(profile) as kernels:
        module = tvm.IRModule({"kernel": greedy()})
        if not need:
            tvm.compile(module, target=target)
            assert [k.shared_bytes for k in kernels] == [16384]
            return
        with pytest.raises(TargetError) as caught:
            tvm.compile(module, target=target)
    assert str(caught.value).startswith(f"kernel kernel_kernel: {need}; compile for a target")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (25 << 30, "25 GiB")],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text
