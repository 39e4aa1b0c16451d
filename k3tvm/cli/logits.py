"""`k3tvm logits`: turns token ids into a NumPy file of logits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3tvm.cli.terminal import command

if TYPE_CHECKING:
    from k3tvm.runtime.engine import Engine

HELP = "compute logits of given token ids"
EPILOG = """\
Writes float32 [1, vocab], the logits after the last id, or [n, vocab] with --all.

examples:
  k3tvm logits k3.bundle --ids 1,2,3 -o logits.npy
  k3tvm logits k3.bundle --ids-file prompt.txt --chunk 64 --all -o logits.npy
  k3tvm logits k3.bundle --ids 1,2,3 --step -o logits.npy     token by token through decode
"""


def add_ids(parser: argparse.ArgumentParser) -> None:
    """The two ways to give token ids; exactly one is needed."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--ids", metavar="LIST", help="token ids, as 1,2,3")
    group.add_argument("--ids-file", metavar="F", help="file with ids, by commas or white space")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options of everything that opens a bundle."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that 'k3tvm compile' wrote")
    parser.add_argument(
        "--device",
        metavar="D",
        help="cpu, vulkan, cuda, metal, one of several as in vulkan:1 or vulkan:NAME,"
        " cuda-emulated, metal-emulated (as compiled for)",
    )
    parser.add_argument(
        "--threads", metavar="N", type=int, help="kernel threads of the CPU (all cores)"
    )
    parser.add_argument("--context", metavar="N", type=int, help="tokens of room (as compiled)")
    parser.add_argument(
        "--no-check", action="store_true", help="do not hash the parameter files (sizes only)"
    )


def open_engine(args: argparse.Namespace, slots: int | None = None) -> Engine:
    """The engine that the options of `add_engine` ask for."""
    from k3tvm.runtime.engine import Engine

    return Engine.open(
        args.bundle,
        slots=slots,
        context=args.context,
        threads=args.threads,
        check=not args.no_check,
        device=args.device,
    )


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = command(subparsers, "logits", HELP, EPILOG)
    add_engine(parser)
    add_ids(parser)
    parser.add_argument("--chunk", metavar="N", type=int, help="ids per call (256, the most)")
    parser.add_argument("--step", action="store_true", help="one id at a time, by decode")
    parser.add_argument("--all", action="store_true", help="logits after every id")
    parser.add_argument("-o", "--output", metavar="OUT.npy", required=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compute and write the logits."""
    import numpy as np

    from k3tvm.cli.terminal import UsageError, parse_ids

    ids = parse_ids(args.ids, args.ids_file)
    if args.chunk is not None and args.chunk < 1:
        raise UsageError(f"--chunk {args.chunk}: must be at least 1")
    out = Path(args.output)
    if not out.parent.is_dir():
        raise UsageError("is not a folder", where=str(out.parent), cure="create it first")
    if out.is_dir():
        raise UsageError("is a folder", where=str(out), cure="name a file with -o")
    if out.exists() and not out.is_file():  # renaming over /dev/null would remove the device
        raise UsageError("is a device or a pipe", where=str(out), cure="name a file with -o")
    engine = open_engine(args)
    if args.step:
        rows = np.concatenate([engine.decode([i]) for i in ids])
        logits = rows if args.all else rows[-1:]
    elif args.all:
        logits = engine.logits(ids, chunk=args.chunk)
    else:
        logits = engine.prefill(ids, chunk=args.chunk)[None]
    part = out.with_name(out.name + ".part")
    with part.open("wb") as file:
        np.save(file, logits)
    part.rename(out)
    best = np.argsort(-logits[-1], kind="stable")[:5]
    top = ", ".join(f"{i} ({logits[-1, i]:.4f})" for i in best)
    print(f"wrote {out}: float32 {list(logits.shape)}; most likely next ids: {top}")
    return 0
