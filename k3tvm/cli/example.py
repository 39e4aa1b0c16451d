"""`k3tvm example`: turns a preset's name into a random checkpoint on disk."""

from __future__ import annotations

import argparse
import sys
from typing import Any

HELP = "write a random checkpoint in the published layout"


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    from k3tvm.checkpoint.presets import PRESETS

    presets = "\n".join(f"  {name:<18}{preset.purpose}" for name, preset in PRESETS.items())
    parser = subparsers.add_parser(
        "example",
        help=HELP,
        description=f"{HELP}: config.json, index and shards.",
        epilog=f"presets:\n{presets}\n\nexample:\n  k3tvm example tiny --preset k3-tiny --seed 7\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dir", metavar="DIR", help="new folder, or one of an earlier example")
    parser.add_argument("--preset", metavar="P", required=True, choices=PRESETS, help="see below")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="0 when not given")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, with progress on a terminal, and say where it is."""
    from k3tvm.checkpoint.example import write_example

    progress = _show if sys.stderr.isatty() else None
    folder = write_example(args.dir, args.preset, args.seed, progress)
    print(f"wrote {args.preset} (seed {args.seed}) to {folder}")
    return 0


def _show(written: int, total: int) -> None:
    end = "\n" if written == total else ""
    print(f"\r{written / 1e6:,.0f} of {total / 1e6:,.0f} MB", end=end, file=sys.stderr, flush=True)
