"""What commands have in common on the terminal: progress, id lists, tables."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3tvm.errors import K3Error


def command(subparsers: Any, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    """A new command's parser; its epilog is shown as it is written."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


class UsageError(K3Error):
    """An argument's value is unusable."""


class Bar:
    """Progress of a long command on stderr: steps as lines, bytes as one line that is redrawn.

    Says nothing when stderr is not a terminal, except the steps when `steps` is set.
    """

    def __init__(self, steps: bool = False) -> None:
        self.live = sys.stderr.isatty()
        self.steps = steps or self.live
        self.done = self.all = 0
        self.drawn = 0.0

    def step(self, message: str) -> None:
        """Print what begins now."""
        if self.steps:
            print(f"  {message}", file=sys.stderr, flush=True)

    def total(self, nbytes: int) -> None:
        """So many bytes are to come."""
        self.done, self.all = 0, nbytes

    def advance(self, nbytes: int) -> None:
        """So many more are done."""
        self.done += nbytes
        now = time.monotonic()
        if not self.live or (now - self.drawn < 0.1 and self.done < self.all):
            return
        self.drawn = now
        part = self.done / self.all if self.all else 1.0
        end = "\n" if self.done >= self.all else ""
        filled = "#" * int(30 * part)
        text = f"\r  [{filled:<30}] {part:4.0%} {self.done / 1e6:,.0f} of {self.all / 1e6:,.0f} MB"
        print(text, end=end, file=sys.stderr, flush=True)


def parse_ids(text: str | None, file: str | None) -> list[int]:
    """Token ids from "1,2,3" or from a file with ids separated by commas or white space."""
    if file is not None:
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot be read: {error}", where=file) from None
    words = (text or "").replace(",", " ").split()
    for word in words:
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise UsageError(
                f"{word[:40]!r} is not a token id", where="ids", cure="write them as 1,2,3"
            )
    if not words:
        raise UsageError("there are no token ids", cure="give some with --ids or --ids-file")
    return [int(word) for word in words]


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for line in lines:
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)
