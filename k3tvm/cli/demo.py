"""`k3tvm demo`: the whole way once, from a random checkpoint to verified logits and new tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from k3tvm.cli.terminal import command

HELP = "write an example checkpoint, compile it, verify it, and generate from it"
EPILOG = """\
Everything is written below DIR (build/demo when not given). Each step is an ordinary command of
k3tvm, printed before it runs, so that it can be repeated with another checkpoint.
"""


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    from k3tvm.checkpoint.presets import PRESETS

    parser = command(subparsers, "demo", HELP, EPILOG)
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", default="build/demo", help="where to write"
    )
    parser.add_argument(
        "--target", metavar="T", default="cpu", help="what to compile for: cpu, vulkan, ... (cpu)"
    )
    parser.add_argument("--preset", metavar="P", choices=PRESETS, default="k3-tiny")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the commands one after the other; stops at the first that fails."""
    from k3tvm.cli.main import main

    folder = Path(args.dir)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, bundle = str(folder / args.preset), str(folder / f"{args.preset}.bundle")
    prompt = ["--ids", "11,7,5,3,2"]
    for words in (
        ["example", checkpoint, "--preset", args.preset],
        ["inspect", checkpoint],
        ["compile", checkpoint, "--target", args.target, "-o", bundle],
        ["verify", bundle],
        ["logits", bundle, *prompt, "-o", str(folder / "logits.npy")],
        ["generate", bundle, *prompt, "--max-tokens", "16"],
    ):
        print(f"\n$ k3tvm {' '.join(words)}", flush=True)
        status = main(words)
        if status:
            return status
    return 0
