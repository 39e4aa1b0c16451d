"""The device that a bundle runs on: exactly the one that was asked for, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from k3tvm.bundle.manifest import CodeEntry, Manifest, damaged
from k3tvm.errors import DeviceError
from k3tvm.runtime.cpu import NEEDS, host_features
from k3tvm.runtime.memory import HostMemory, Memory

CPU = 1  # DLPack's number of the device type


@dataclass(frozen=True)
class Device:
    """An opened device: what the user reads, DLPack's type and index, memory, and fitting code."""

    label: str
    type: int
    index: int
    memory: Memory
    code: CodeEntry


def open_device(folder: Path, manifest: Manifest, wanted: str | None) -> Device:
    """The device `KIND[:SELECTOR]`, with the code of the bundle that it can run.

    Without a wish it is a device of the kind that the bundle was compiled for first. Raises
    DeviceError when there is no such device, the bundle has no code for it, or the code asks for
    more than it has.
    """
    kind, colon, selector = (manifest.code[0].kind if wanted is None else wanted).partition(":")
    if kind not in OPENERS:
        raise DeviceError(f"device {wanted!r}: not known; choose one of: {', '.join(OPENERS)}")
    if colon and not selector.strip():  # an empty variable of a script must not choose
        raise DeviceError(f"device {wanted!r}: nothing stands after the colon")
    entries = [c for c in manifest.code if c.kind == kind]
    if not entries:
        there = ", ".join(c.target for c in manifest.code)
        raise DeviceError(
            f"has no code for {kind}, only for {there}",
            where=str(folder),
            cure=f"compile it with --target {kind}",
        )
    return OPENERS[kind](folder, entries, selector)


def _open_cpu(folder: Path, entries: list[CodeEntry], selector: str) -> Device:
    if selector not in ("", "0"):
        raise DeviceError(f"device cpu:{selector}: there is one CPU, called cpu")
    refusals = []
    for code in entries:
        lacking = _cpu_lacks(folder, code)
        if not lacking:
            return Device("cpu", CPU, 0, HostMemory(), code)
        refusals.append(f"{', '.join(lacking)}, which {code.target} needs")
    raise DeviceError(
        f"this CPU lacks {'; '.join(refusals)}",
        cure="compile again on this machine, or with --target cpu:portable",
    )


def _cpu_lacks(folder: Path, code: CodeEntry) -> list[str]:
    needs = {str(isa): features for isa, features in NEEDS.items()}
    if code.isa not in needs:
        raise damaged(folder, f"no instruction set is called {code.isa!r}")
    return sorted(needs[code.isa] - host_features())


def _open_vulkan(folder: Path, entries: list[CodeEntry], selector: str) -> Device:
    from k3tvm.runtime.device_memory import VULKAN, DeviceMemory
    from k3tvm.vulkan import plugin
    from k3tvm.vulkan.devices import KernelNeeds, find, lacks

    plugin.load()
    found = find(selector)
    refusals = []
    for code in entries:
        lacking = lacks(found, KernelNeeds.of(code.device_kernels))
        if not lacking:
            memory = DeviceMemory(VULKAN, found.index, "k3tvm.vulkan")
            return Device(f"vulkan:{found.index} {found.name}", VULKAN, found.index, memory, code)
        refusals.append(f"{code.target}: {'; '.join(lacking)}")
    raise DeviceError(
        f"cannot run this bundle: {' | '.join(refusals)}",
        where=f"vulkan:{found.index} {found.name}",
        cure=f"compile with --target vulkan:from-device:{found.index}",
    )


def _open_cuda(folder: Path, entries: list[CodeEntry], selector: str) -> Device:
    from k3tvm.cuda import runtime
    from k3tvm.runtime.device_memory import DeviceMemory

    found = runtime.find(selector)
    label, refusals = f"cuda:{found.index} {found.name}", []
    for code in entries:
        lacking = runtime.lacks(found, folder / code.file.path)
        if not lacking:
            memory = DeviceMemory(runtime.CUDA, found.index, "k3tvm.cuda")
            return Device(label, runtime.CUDA, found.index, memory, code)
        refusals.append(f"{code.target}: {lacking}")
    raise DeviceError(
        f"cannot run this bundle: {' | '.join(refusals)}",
        where=label,
        cure=f"compile with --target cuda:{found.arch}",
    )


def _open_metal(folder: Path, entries: list[CodeEntry], selector: str) -> Device:
    from k3tvm.metal import runtime
    from k3tvm.runtime.device_memory import DeviceMemory

    index = runtime.find(selector)
    loadable = [code for code in entries if code.file.path.endswith(".dylib")]
    if not loadable:
        raise DeviceError(
            "its code for Metal is for iOS, where an app links it",
            where=str(folder),
            cure="compile it with --target metal",
        )
    memory = DeviceMemory(runtime.METAL, index, runtime.PREFIX)
    return Device(f"metal:{index}", runtime.METAL, index, memory, loadable[0])


def _open_emulated(folder: Path, entries: list[CodeEntry], selector: str) -> Device:
    from k3tvm import emulate
    from k3tvm.runtime.device_memory import DeviceMemory

    code = entries[0]
    if selector not in ("", "0"):
        raise DeviceError(f"device {code.kind}:{selector}: there is one, called {code.kind}")
    kind: emulate.Kind = "cuda" if code.kind == "cuda-emulated" else "metal"
    emulate.install(kind)
    type_ = emulate.TYPES[kind]
    return Device(emulate.NAMES[kind], type_, 0, DeviceMemory(type_, 0, "k3tvm.emulate"), code)


OPENERS: dict[str, Callable[[Path, list[CodeEntry], str], Device]] = {
    "cpu": _open_cpu,
    "vulkan": _open_vulkan,
    "cuda": _open_cuda,
    "metal": _open_metal,
    "cuda-emulated": _open_emulated,
    "metal-emulated": _open_emulated,
}
