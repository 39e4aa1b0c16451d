"""`k3tvm inspect`: turns a checkpoint, or just its configuration, into facts on the screen."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from k3tvm.cli.terminal import command

if TYPE_CHECKING:
    from k3tvm.checkpoint.inspect import Facts

HELP = "say what a checkpoint holds, and whether all of it is there"
EPILOG = """\
Reads headers only, never tensor data, and needs no shards: a folder with config.json and the
index, or config.json by itself, is enough to plan a checkpoint that is not downloaded yet.

examples:
  k3tvm inspect Kimi-K3                 a folder with shards, or with config.json and the index
  k3tvm inspect Kimi-K3/config.json     the configuration alone
  k3tvm inspect Kimi-K3 --json          the same facts for a script

Exits 2, after printing the facts, when tensors are missing, unexpected or of the wrong form.
"""


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = command(subparsers, "inspect", HELP, EPILOG)
    parser.add_argument("path", metavar="PATH", help="checkpoint folder or config.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts, then raise CheckpointError if the checkpoint does not fit."""
    from k3tvm.checkpoint import Checkpoint
    from k3tvm.checkpoint.inspect import inspect_checkpoint

    checkpoint = Checkpoint.open(args.path)
    facts = inspect_checkpoint(checkpoint)
    print(json.dumps(asdict(facts), indent=2) if args.json else table(facts))
    checkpoint.check()
    return 0


SOURCES = {
    "data": "headers of all shards",
    "index": "config.json and index; no shards here, sizes are those of the published form",
    "config": "config.json alone; sizes are those of the published form",
}


def table(facts: Facts) -> str:
    """The facts as aligned lines."""
    skipped = f", {facts.skipped} skipped by rule" if facts.skipped else ""
    oddities = f"{facts.missing} missing, {facts.unexpected} unexpected"
    rows = [
        ("checkpoint", facts.path),
        ("read from", SOURCES[facts.source]),
        ("family", facts.family),
        ("layers", _layers(facts.config)),
        ("experts", _experts(facts)),
        ("parameters", f"{_short(facts.parameters)} ({_short(facts.active_parameters)} active)"),
        ("tensors", f"{facts.tensors:,}: {facts.text_tensors:,} of the text model{skipped}"),
        ("", oddities),
        ("text bytes", f"{facts.bytes:,} ({_short(facts.bytes)}B), of which"),
        *((f"  {kind}", f"{_short(size)}B") for kind, size in facts.bytes_by_kind.items()),
        *([("all bytes", f"{facts.total_bytes:,}")] if facts.total_bytes is not None else []),
        *_contradiction(facts),
        ("per token", f"{_short(facts.bytes_per_token)}B of weights are read to decode one token"),
        ("compiles", "yes" if facts.compiles else "no"),
    ]
    return "\n".join(f"{name:<14}{text}".rstrip() for name, text in rows)


def _contradiction(facts: Facts) -> list[tuple[str, str]]:
    if facts.stated_bytes in (None, facts.total_bytes):
        return []
    return [("", f"the index states {facts.stated_bytes:,} bytes, which is not right")]


def _layers(config: dict[str, Any]) -> str:
    block = config["attn_res_block_size"]
    residual = f", attention residuals in blocks of {block}" if block else ""
    return (
        f"{config['num_layers']}: {config['kda_layers']} KDA, {config['mla_layers']} MLA; "
        f"{config['dense_layers']} dense, {config['moe_layers']} with experts{residual}"
    )


def _experts(facts: Facts) -> str:
    config = facts.config
    if not config["num_experts"]:
        return "none"
    count = f"{config['experts_per_token']} of {config['num_experts']}"
    return f"{count} a token, {config['num_shared_experts']} shared, {facts.experts}"


def _short(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000 or unit == "T":
            break
        count /= 1000
    return f"{count:.4g} {unit}"
