"""Turns the plug-in's list of Vulkan devices into objects that are chosen and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from k3tvm.errors import DeviceError

Kind = Literal["discrete", "integrated", "virtual", "cpu", "other"]
INSTALL = "on Debian and Ubuntu: apt install libvulkan1 mesa-vulkan-drivers"


@dataclass(frozen=True)
class Device:
    """A Vulkan device as its driver reports it; the names are those of `GpuProfile`.

    memory_bytes: of its own heaps; unified: they are the host's memory too. `reason` says why a
    device is not usable.
    """

    index: int
    name: str
    kind: Kind
    driver: str
    api: str
    threads: int
    threads_xyz: tuple[int, int, int]
    shared_bytes: int
    grid: tuple[int, int, int]
    push_bytes: int
    subgroup: int
    features: frozenset[str]
    memory_bytes: int
    unified: bool
    usable: bool
    reason: str = ""

    @property
    def label(self) -> str:
        """Index and name, as in "1 (RTX 4090)"."""
        return f"{self.index} ({self.name})"


class Kernel(Protocol):
    """What must be known of a kernel to say which devices run it."""

    @property
    def threads(self) -> tuple[int, int, int]:
        """x, y, z."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a workgroup."""

    @property
    def push_bytes(self) -> int:
        """Arguments that are pushed."""

    @property
    def features(self) -> Iterable[str]:
        """By the names of `schedules.profile`."""


@dataclass(frozen=True)
class KernelNeeds:
    """The most that any kernel of a library asks of a device; sizes in bytes."""

    threads: int
    threads_xyz: tuple[int, int, int]
    shared_bytes: int
    push_bytes: int
    features: frozenset[str]

    @classmethod
    def of(cls, kernels: Iterable[Kernel]) -> KernelNeeds:
        """The needs of all kernels together."""
        known = list(kernels)
        x, y, z = (max((k.threads[i] for k in known), default=0) for i in range(3))
        return cls(
            threads=max((math.prod(k.threads) for k in known), default=0),
            threads_xyz=(x, y, z),
            shared_bytes=max((k.shared_bytes for k in known), default=0),
            push_bytes=max((k.push_bytes for k in known), default=0),
            features=frozenset(f for k in known for f in k.features),
        )


@cache
def devices() -> tuple[Device, ...]:
    """All devices, in the order of the Vulkan loader; DeviceError without plug-in or loader."""
    from k3tvm.vulkan import plugin

    plugin.load()
    from k3tvm._ffi import tvm_ffi

    text = str(tvm_ffi.get_global_func("k3tvm.vulkan.devices")())
    return tuple(parse(d) for d in json.loads(text))


def parse(facts: dict[str, Any]) -> Device:
    """One device of the plug-in's list."""
    limits = facts["limits"]
    return Device(
        index=facts["index"],
        name=facts["name"],
        kind=facts["type"],
        driver=f"{facts['driver_name']} {facts['driver_info']}".strip(),
        api=facts["api_version"],
        threads=limits["max_threads"],
        threads_xyz=_three(limits["max_threads_dim"]),
        shared_bytes=limits["shared_bytes"],
        grid=_three(limits["max_grid"]),
        push_bytes=limits["push_bytes"],
        subgroup=facts["subgroup"],
        features=frozenset(facts["features"]),
        memory_bytes=sum(h["bytes"] for h in facts["heaps"] if h["device_local"]),
        unified=facts["unified"],
        usable=facts["usable"],
        reason=facts["why_not"],
    )


def _three(values: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = values
    return x, y, z


def find(selector: str = "", among: Sequence[Device] | None = None) -> Device:
    """The device that `selector` names: an index, part of a name, or "" for the first usable one.

    Real GPUs come before devices that are software on the CPU when nothing is named. DeviceError
    lists what there is when nothing, more than one, or an unusable device is meant (F26).
    """
    present = devices() if among is None else among
    if not present:
        raise DeviceError("the driver list is empty", where="Vulkan devices", cure=INSTALL)
    meant = _meant(selector.strip(), present)
    usable = [d for d in meant if d.usable]
    if len(usable) == 1 or (usable and not selector.strip()):
        return usable[0]
    raise _refusal(selector.strip(), present, meant, len(usable))


def _meant(selector: str, present: Sequence[Device]) -> list[Device]:
    if not selector:
        return sorted(present, key=lambda d: d.kind == "cpu")
    if selector.isdecimal():
        return [d for d in present if d.index == int(selector)]
    return [d for d in present if selector.lower() in d.name.lower()]


def _refusal(
    selector: str, present: Sequence[Device], meant: Sequence[Device], usable: int
) -> DeviceError:
    where = f"Vulkan device {selector}".strip()
    listed = f"devices here: {'; '.join(d.label for d in present)}"
    if usable > 1:
        return DeviceError("is not one device", where=where, cure=f"use its number; {listed}")
    if meant:
        reasons = "; ".join(f"{d.label}: {d.reason}" for d in meant)
        return DeviceError(f"cannot be used: {reasons}", where=where, cure=listed)
    return DeviceError("is not there", where=where, cure=listed)


def lacks(device: Device, needs: KernelNeeds) -> list[str]:
    """What keeps a device from running a library, in words; [] when nothing does."""
    if not device.usable:
        return [device.reason]
    return list(_lacks(device, needs))


def _lacks(device: Device, needs: KernelNeeds) -> Iterator[str]:
    axes = zip("xyz", needs.threads_xyz, device.threads_xyz, strict=True)
    counts = {"a workgroup": (needs.threads, device.threads)} | {a: (n, h) for a, n, h in axes}
    for where, (need, has) in counts.items():
        if need > has:
            yield f"{need - has} threads in {where} more: needs {need}, has {has}"
    sizes = {
        "shared memory": (needs.shared_bytes, device.shared_bytes),
        "push constants": (needs.push_bytes, device.push_bytes),
    }
    for what, (need, has) in sizes.items():
        if need > has:
            yield f"{size(need - has)} of {what} more: needs {size(need)}, has {size(has)}"
    if missing := sorted(needs.features - device.features):
        yield f"it has no {', '.join(missing)}"


def size(count: int) -> str:
    """Bytes for people, exact where they are whole KiB, MiB or GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count // scale if count % scale == 0 else round(count / scale, 1)} {unit}"
    return f"{count} bytes"
