"""A manifest becomes the report on its GPU kernels: Markdown, JSON or text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3tvm.bundle.kernels import Point
from k3tvm.bundle.manifest import CodeEntry, Manifest
from k3tvm.errors import TargetError
from k3tvm.report.devices import LAUNCH, Figures
from k3tvm.report.rows import (
    FunctionRow,
    OperatorRow,
    device_of,
    function_rows,
    operator_rows,
)

Cells = Sequence[Sequence[str]]
Table = Callable[[Cells, Sequence[str]], str]

OPERATORS = (
    "operator",
    "calls",
    "launches",
    "workgroups",
    "minimum MB",
    "moved MB",
    "ratio",
    "by workgroups MB",
    "requested MB",
    "ops/byte",
    "bound by",
    "estimate us",
    "of a step us",
)
FUNCTIONS = (
    "function",
    "threads",
    "grid",
    "shared bytes",
    "arch",
    "registers",
    "spill bytes",
    "stack bytes",
    "occupancy",
    "limited by",
)


def write_report(manifest: Manifest, path: Path) -> None:
    """Write the report to `path`, in the form that its name ends in: .md, .json, else text."""
    forms = {".md": _markdown, ".json": as_json}
    text = forms.get(path.suffix, _text)(manifest)
    try:
        path.write_text(text)
    except OSError as error:
        raise TargetError(f"cannot be written: {error}", where=f"report {path}") from None


def as_json(manifest: Manifest) -> str:
    """Everything as one JSON object."""
    return json.dumps({"targets": [_facts(code) for code in _codes(manifest)]}, indent=1) + "\n"


def _codes(manifest: Manifest) -> list[CodeEntry]:
    return [code for code in manifest.code if code.points]


def _facts(code: CodeEntry) -> dict[str, Any]:
    def operator(row: OperatorRow) -> dict[str, Any]:
        return asdict(row) | {"ratio": row.ratio, "intensity": row.intensity}

    return {
        "target": code.target,
        "device": asdict(device_of(code)),
        "points": [
            asdict(p) | {"operators": [operator(r) for r in operator_rows(code, p.name)]}
            for p in code.points
        ],
        "functions": [asdict(row) for row in function_rows(code)],
    }


def _markdown(manifest: Manifest) -> str:
    return _document(manifest, _markdown_table, "# ", "## ")


def _text(manifest: Manifest) -> str:
    from k3tvm.cli.terminal import table

    def plain(rows: Cells, head: Sequence[str]) -> str:
        return table([list(row) for row in rows], list(head))

    return _document(manifest, plain, "", "")


def _document(manifest: Manifest, table: Table, first: str, second: str) -> str:
    parts = []
    for code in _codes(manifest):
        device = device_of(code)
        parts += [f"{first}GPU kernels of {code.target}", _head(device)]
        for point in code.points:
            rows = operator_rows(code, point.name)
            parts += [f"{second}{_title(point)}", _step(rows), table(_operators(rows), OPERATORS)]
        parts += [f"{second}Device functions", table(_functions(function_rows(code)), FUNCTIONS)]
    return "\n\n".join(parts or ["No GPU kernels."]) + "\n"


def _head(d: Figures) -> str:
    return (
        f"Estimates are for {d.name}: {d.bytes / 1e12:.2f} TB/s,"
        f" {d.flops / 1e12:.1f} TFLOP/s in float32, {d.matrix_flops / 1e12:.0f} TFLOP/s in 16-bit"
        f" matrices ({d.source}); a launch takes {LAUNCH * 1e6:.0f} us at least (assumed). Nothing"
        " here was measured. A number after <= is an upper bound."
    )


def _title(p: Point) -> str:
    return f"{p.name} (n = {p.rows}, m = {p.sequences}, {p.cached} tokens cached of each sequence)"


def _step(rows: Sequence[OperatorRow]) -> str:
    moved = sum(r.moved_bytes * r.calls for r in rows)
    least = sum(r.minimum_bytes * r.calls for r in rows if r.launches)
    launches = sum(r.launches * r.calls for r in rows)
    seconds = sum(r.seconds * r.calls for r in rows)
    return (
        f"A step: {launches} launches, {moved / 1e9:.3f} GB moved, at least {least / 1e9:.3f} GB;"
        f" estimate {seconds * 1e3:.3f} ms.{_missing(rows)}"
    )


def _missing(rows: Sequence[OperatorRow]) -> str:
    count = sum(not r.launches for r in rows)
    return f" Without {count} operators that could not be counted." if count else ""


def _operators(rows: Sequence[OperatorRow]) -> Cells:
    def mega(count: int) -> str:
        return f"{count / 1e6:.3f}"

    return [
        [
            r.operator,
            str(r.calls),
            str(r.launches),
            str(r.workgroups),
            mega(r.minimum_bytes),
            ("" if r.exact else "<= ") + mega(r.moved_bytes),
            f"{r.ratio:.3f}",
            mega(r.group_bytes),
            mega(r.requested_bytes),
            f"{r.intensity:.2f}",
            r.bound,
            f"{r.seconds * 1e6:.1f}",
            f"{r.seconds * r.calls * 1e6:.1f}",
        ]
        for r in rows
    ]


def _functions(rows: Sequence[FunctionRow]) -> Cells:
    cells = []
    for r in rows:
        u = r.resources
        compiled = [u.arch, u.registers, u.spill_bytes, u.stack_bytes] if u else ["", "", "", ""]
        share = "" if r.occupancy is None else f"{r.occupancy:.0%}"
        threads = " x ".join(str(t) for t in r.threads if t > 1) or "1"
        shared = u.shared_bytes if u else r.shared_bytes
        row = [r.function, threads, _grid(r.grid), shared, *compiled, share, r.limit]
        cells.append([str(c) for c in row])
    return cells


def _grid(extents: Sequence[str]) -> str:
    """The workgroups by dimension; a list of them that goes on along y is one number."""
    folded = re.fullmatch(r"min\((.*), (\d+)\)", extents[0]) if len(extents) == 2 else None
    if folded and extents[1] == f"({folded[1]} + {int(folded[2]) - 1}) // {folded[2]}":
        return folded[1]
    return ", ".join(e for i, e in enumerate(extents) if i == 0 or e != "1")


def _markdown_table(rows: Cells, head: Sequence[str]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
