"""Devices as the plug-in would report them and bundles that are only manifests, for tests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from k3tvm._ffi import PINS
from k3tvm.bundle.manifest import CodeEntry, DeviceKernel, FileEntry, Manifest
from k3tvm.vulkan.devices import Device, parse

LIBRARY = b"x"
FEATURES = (
    "float16 int8 int16 int64 float64 storage8 storage16 subgroup_arithmetic subgroup_shuffle"
)


def report(index: int = 0, name: str = "Test GPU", **changes: Any) -> dict[str, Any]:
    """One device of the plug-in's list; `changes` go to the limits where they belong there."""
    limits = {
        "max_threads": 1024,
        "max_threads_dim": [1024, 1024, 64],
        "max_grid": [2**31 - 1, 65535, 65535],
        "shared_bytes": 49152,
        "push_bytes": 256,
    }
    facts = {
        "index": index,
        "name": name,
        "type": "discrete",
        "driver_name": "Test",
        "driver_info": "1.2.3",
        "api_version": "1.3.0",
        "subgroup": 32,
        "features": FEATURES.split(),
        "unified": False,
        "heaps": [
            {"bytes": 8 << 30, "device_local": True},
            {"bytes": 16 << 30, "device_local": False},
        ],
        "usable": True,
        "why_not": "",
    }
    assert set(changes) <= limits.keys() | facts.keys()
    limits |= {k: v for k, v in changes.items() if k in limits}
    return facts | {k: v for k, v in changes.items() if k in facts} | {"limits": limits}


def device(index: int = 0, name: str = "Test GPU", **changes: Any) -> Device:
    """The same, parsed."""
    return parse(report(index, name, **changes))


def bundle(folder: Path, *code: CodeEntry, **changes: Any) -> str:
    """A bundle of nothing but a manifest and libraries of one byte."""
    (folder / "code").mkdir(parents=True)
    for entry in code:
        (folder / entry.file.path).write_bytes(LIBRARY)
    facts: dict[str, Any] = {
        "config": {}, "activations": "float32", "code": code, "arrays": (), "params": (),
        "states": (), "sites": 1, "slots": 1, "context": 1, "source": "",
        "versions": dict(PINS), "has_weights": True,
    }  # fmt: skip
    Manifest(**(facts | changes)).save(folder)
    return str(folder)


def code(target: str, isa: str = "", *kernels: DeviceKernel) -> CodeEntry:
    """A library in a manifest; its file is never loaded."""
    kind = target.split(":")[0].split("-")[0]
    file = FileEntry(f"code/{kind}.so", len(LIBRARY), hashlib.sha256(LIBRARY).hexdigest())
    return CodeEntry(target, kind, "", isa, file, (), 1, 1, kernels)


NVIDIA = code(
    "vulkan-nvidia",
    "",
    DeviceKernel("a", (256, 1, 1), 45056, 64, ("float16", "int64")),
    DeviceKernel("b", (32, 16, 1), 64, 8, ("storage8",)),
)
