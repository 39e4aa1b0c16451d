"""Turns this machine, and perhaps a bundle, into facts: what is installed, and what would run."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3tvm.bundle.manifest import CodeEntry, Manifest
from k3tvm.errors import K3Error
from k3tvm.vulkan.devices import INSTALL, Device, KernelNeeds, devices, lacks

LOADER = "libvulkan.so.1"


@dataclass(frozen=True)
class Part:
    """Something that has to be there: what and where it is, or what the problem is."""

    name: str
    version: str = ""
    path: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether a device runs a library, or what it lacks."""

    device: str
    runs: bool
    lacks: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """A compiled library of a bundle: its target, what it needs (GPUs only), and who runs it."""

    target: str
    needs: KernelNeeds | None
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Survey:
    """All that `doctor` says. compilers: for compiling; parts: for running.

    devices: of Vulkan; gpus: those of CUDA and Metal. has_weights: of the bundle, if there is one.
    `runs`: some device runs some library of the bundle; without a bundle, some GPU is usable.
    """

    compilers: tuple[Part, ...]
    parts: tuple[Part, ...]
    devices: tuple[Device, ...]
    gpus: tuple[Part, ...]
    bundle: str
    has_weights: bool | None
    libraries: tuple[Library, ...]
    runs: bool


def survey(bundle: Path | None = None) -> Survey:
    """Look at this machine; BundleError for something that is not a bundle, or is damaged."""
    manifest = _checked(bundle) if bundle else None
    plugin, found = _devices()
    libraries = tuple(_libraries(bundle, manifest, found)) if bundle and manifest else ()
    verdicts = [v.runs for library in libraries for v in library.verdicts]
    gpus = cuda(), metal()
    usable = [*(d.usable for d in found), *(not g.problem for g in gpus)]
    return Survey(
        compilers=tuple(_compilers()),
        parts=(plugin, loader(), emulation()),
        devices=found,
        gpus=gpus,
        bundle=str(bundle or ""),
        has_weights=manifest.has_weights if manifest else None,
        libraries=libraries,
        runs=any(verdicts if manifest else usable),
    )


def _checked(bundle: Path) -> Manifest:
    """The manifest of a bundle whose files are there; parameters are not hashed."""
    from k3tvm.bundle.params import check_file  # brings NumPy along

    manifest = Manifest.load(bundle)
    manifest.check_seal(bundle)
    for code in manifest.code:
        check_file(bundle, code.file, content=True)
    for file in manifest.params:
        check_file(bundle, file, content=False)
    return manifest


def _compilers() -> Iterator[Part]:
    """The tools for device code of each kind; only needed where models are compiled."""
    from k3tvm.cuda import tools as cuda
    from k3tvm.metal import zig as metal
    from k3tvm.vulkan import tools as vulkan

    for name, text in (vulkan.tools() | cuda.tools() | metal.tools()).items():
        good = re.fullmatch(r"([0-9.]+) \((.*)\)", text)
        if good:
            yield Part(name, version=good[1], path=good[2])
        else:
            yield Part(name, problem=text.removeprefix(f"{name}: "))


def _devices() -> tuple[Part, tuple[Device, ...]]:
    """The plug-in, and the devices that it sees."""
    name = "plug-in"
    try:
        from k3tvm.native import library  # TVM's runtime may be absent, or of another version
        from k3tvm.vulkan import plugin

        plugin.load()
    except K3Error as error:
        return Part(name, problem=str(error)), ()
    part = Part(name, version=library.ABI, path=str(plugin.LIBRARY))
    try:
        return part, devices()
    except K3Error as error:
        return Part(name, version=part.version, path=part.path, problem=str(error)), ()


def loader() -> Part:
    """The Vulkan loader, which finds the drivers."""
    name = os.environ.get("K3TVM_VULKAN_LOADER") or LOADER
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return Part("loader", problem=f"{name} is not installed; {INSTALL}")
    packed = ctypes.c_uint32(1 << 22)  # what a loader of Vulkan 1.0, without the function, is
    if hasattr(library, "vkEnumerateInstanceVersion"):
        library.vkEnumerateInstanceVersion(ctypes.byref(packed))
    major, minor, patch = packed.value >> 22, packed.value >> 12 & 0x3FF, packed.value & 0xFFF
    return Part("loader", version=f"{major}.{minor}.{patch}", path=name)


def emulation() -> Part:
    """What runs CUDA and Metal code on the CPU."""
    from k3tvm import native
    from k3tvm.native import library

    try:
        native.load()
    except K3Error as error:
        return Part("emulation", problem=str(error))
    return Part("emulation", version=library.ABI, path=str(native.LIBRARY))


def cuda() -> Part:
    """NVIDIA's GPUs with their compute capabilities."""
    from k3tvm.cuda import runtime

    try:
        found = runtime.devices()
    except K3Error as error:
        return Part("cuda", problem=str(error))
    names = (f"cuda:{d.index} {d.name} ({'.'.join(map(str, d.capability))})" for d in found)
    return Part("cuda", version=", ".join(names), problem="" if found else "there is no device")


def metal() -> Part:
    """Apple's GPU."""
    from k3tvm.metal import runtime

    try:
        return Part("metal", version=f"metal:{runtime.find()}")
    except K3Error as error:
        return Part("metal", problem=str(error))


def _libraries(bundle: Path, manifest: Manifest, found: tuple[Device, ...]) -> Iterator[Library]:
    foreign = _foreign(manifest)
    for code in manifest.code:
        needs = KernelNeeds.of(code.device_kernels) if code.kind == "vulkan" else None
        if needs is not None:
            short = {f"vulkan:{d.index}": lacks(d, needs) for d in found}
        elif code.kind == "cpu":
            short = {"cpu": _cpu_lacks(code)}
        else:
            short = {code.kind: _cannot_open(bundle, manifest, code)}
        verdicts = (Verdict(d, not foreign + s, tuple(foreign + s)) for d, s in short.items())
        yield Library(code.target, needs, tuple(verdicts))


def _cannot_open(bundle: Path, manifest: Manifest, code: CodeEntry) -> list[str]:
    """Why there is no device of a kind that has no survey of its own."""
    try:
        from k3tvm.runtime.device import open_device  # brings NumPy along

        open_device(bundle, manifest, code.kind)
    except K3Error as error:
        return [str(error)]
    return []


def _foreign(manifest: Manifest) -> list[str]:
    """What keeps any device of this machine from running the bundle: another version of TVM."""
    try:
        from k3tvm._ffi import PINS
    except K3Error as error:
        return [str(error)]
    made = {package: manifest.versions.get(package, "an unknown version") for package in PINS}
    return [f"{p} {v}, here is {PINS[p]}" for p, v in made.items() if v != PINS[p]]


def _cpu_lacks(code: CodeEntry) -> list[str]:
    from k3tvm.runtime.cpu import NEEDS, host_features  # brings the engine and NumPy along

    needs = {str(isa): features for isa, features in NEEDS.items()}
    if code.isa not in needs:
        return [f"the instruction set {code.isa!r}, which is not known"]
    return sorted(needs[code.isa] - host_features())
