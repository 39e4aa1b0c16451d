"""`k3tvm doctor`: turns this machine, and perhaps a bundle, into a list of what would run."""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from k3tvm.cli.terminal import command

if TYPE_CHECKING:
    from k3tvm.survey import Library, Part, Survey
    from k3tvm.vulkan.devices import Device, KernelNeeds

HELP = "say what compiling and running need and this machine has, and what would run a bundle"
EPILOG = """\
examples:
  k3tvm doctor               tools, plug-in, drivers, devices
  k3tvm doctor k3.bundle     which devices would run this bundle, and what the others lack
  k3tvm doctor --build       compile the native libraries first, with g++

targets for 'k3tvm compile --target vulkan...', each a promise not to use more than it says:
  vulkan                   any desktop GPU: 256 threads, 32 KiB of shared memory
  vulkan:nvidia            Turing and newer
  vulkan:amd               RDNA and newer
  vulkan:intel             Xe and Arc
  vulkan:apple             Apple silicon through MoltenVK
  vulkan:mobile            Adreno 7xx and Mali Valhall
  vulkan:lavapipe          Mesa on the CPU
  vulkan:from-device[:N]   a device of this machine, by number or part of its name
  vulkan:NAME+FEATURE      and one more feature, such as cooperative_matrix

'k3tvm compile --help' lists the targets of CUDA and Metal.

Exits 1 when nothing can run: no usable GPU, or none of the bundle's targets.
"""
WIDTH = 100
LABEL = 16
KINDS = {
    "discrete": "GPU",
    "integrated": "integrated GPU",
    "virtual": "virtual GPU",
    "cpu": "software on the CPU",
    "other": "accelerator",
}


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = command(subparsers, "doctor", HELP, EPILOG)
    parser.add_argument("bundle", metavar="BUNDLE", nargs="?", help="compiled bundle to judge")
    parser.add_argument("--build", action="store_true", help="compile the native libraries")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, print, and return 0 when something can run."""
    from k3tvm.survey import survey

    if args.build:
        from k3tvm import native
        from k3tvm.vulkan import plugin

        native.build()
        plugin.build()
    found = survey(Path(args.bundle) if args.bundle else None)
    print(json.dumps(asdict(found), indent=2, default=sorted) if args.json else text(found))
    return 0 if found.runs else 1


def text(found: Survey) -> str:
    """The facts as lines with labels on the left."""
    lines = ["to compile"]
    lines += [_row(p.name, _part(p)) for p in found.compilers]
    lines += ["", "to run"]
    lines += [_row(p.name, _part(p)) for p in found.parts]
    for device in found.devices:
        lines.append(_row(f"vulkan:{device.index}", *_device(device)))
    lines += [_row(g.name, f"none: {g.problem}" if g.problem else g.version) for g in found.gpus]
    for library in found.libraries:
        lines += ["", f"{found.bundle}, compiled for {library.target}", *_library(library)]
    return "\n".join([*lines, "", _verdict(found)])


def _row(label: str, *paragraphs: str) -> str:
    """A label and wrapped paragraphs beside it."""
    inside = WIDTH - LABEL - 2
    lines = [
        line
        for p in paragraphs
        for line in textwrap.wrap(p, inside, break_long_words=False, break_on_hyphens=False)
    ]
    first, *others = lines or [""]
    head = f"  {label:<{LABEL}}{first}"
    return "\n".join([head, *(" " * (LABEL + 2) + line for line in others)])


def _part(part: Part) -> str:
    place = part.path.replace(os.path.expanduser("~"), "~", 1)
    return " ".join(
        w for w in (part.version, place, part.problem and f"PROBLEM: {part.problem}") if w
    )


def _device(device: Device) -> Iterator[str]:
    from k3tvm.schedules.profile import FOREIGN, Feature
    from k3tvm.vulkan.devices import size

    yield f"{device.name}: {KINDS[device.kind]}"
    if not device.usable:
        yield f"NOT USABLE: {device.reason}"
    yield f"driver {device.driver}, Vulkan {device.api}"
    if not device.usable:
        return
    memory = "of the CPU's memory" if device.unified else "of memory"
    yield (
        f"{size(device.memory_bytes)} {memory}; {device.threads} threads,"
        f" {size(device.shared_bytes)} shared, {device.push_bytes} bytes pushed"
    )
    yield f"has {' '.join(sorted(device.features))}"
    if lacking := sorted(set(get_args(Feature)) - FOREIGN - device.features):
        yield f"lacks {' '.join(lacking)}"


def _library(library: Library) -> Iterator[str]:
    if library.needs:
        yield _row("needs", _needs(library.needs))
    for verdict in library.verdicts:
        yield _row(
            verdict.device, "runs" if verdict.runs else f"DOES NOT RUN: {'; '.join(verdict.lacks)}"
        )


def _needs(needs: KernelNeeds) -> str:
    from k3tvm.vulkan.devices import size

    return (
        f"{needs.threads} threads, {size(needs.shared_bytes)} shared, {needs.push_bytes} bytes"
        f" pushed; {' '.join(sorted(needs.features))}"
    )


def _verdict(found: Survey) -> str:
    what = found.bundle or "GPU code"
    if found.has_weights is False:
        what = f"the code of {what} (it has no weights)"
    if not found.runs:
        return f"{what} cannot run here: {_cure(found)}"
    able = [v.device for library in found.libraries for v in library.verdicts if v.runs]
    able = able or [f"vulkan:{d.index}" for d in found.devices if d.usable]
    able = able or [g.name for g in found.gpus if not g.problem]
    return f"{what} can run here, with {' or '.join(f'--device {a}' for a in able)}"


def _cure(found: Survey) -> str:
    from k3tvm.vulkan.devices import INSTALL

    kinds = {re.split(r":|-(?!emulated)", library.target)[0] for library in found.libraries}
    if kinds == {"cpu"}:
        return "compile it again on this machine, or with --target cpu:portable"
    if problems := [f"{p.name}: {p.problem}" for p in found.parts if p.problem]:
        return problems[0]  # others are listed above
    if kinds and kinds.isdisjoint({"cpu", "vulkan"}):
        kind = min(kinds).removesuffix("-emulated")
        return f"to try it without that device, add --target {kind}-emulated when you compile it"
    if any(d.usable for d in found.devices):
        return "compile it with --target vulkan:from-device"
    return f"no Vulkan device is usable; {INSTALL}"
