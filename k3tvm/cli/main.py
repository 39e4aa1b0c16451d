"""Turns command-line arguments into a call of one command and an exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

from k3tvm import __version__
from k3tvm.errors import K3Error

# One module of this package a command, in the order in which help lists them. Each offers
# `register(subparsers)`, which sets `run`, a function from the parsed arguments to the exit
# status. Modules import what is heavy inside `run` only, because help loads all of them.
COMMANDS: tuple[str, ...] = (
    "inspect",
    "example",
    "compile",
    "logits",
    "generate",
    "verify",
    "bench",
    "doctor",
    "demo",
)

EXAMPLES = """\
examples:
  k3tvm demo                              all of the following once, on a small random model
  k3tvm example tiny --preset k3-tiny     write a small random checkpoint
  k3tvm inspect tiny                      see what it holds and whether all of it is there
  k3tvm compile tiny --target cpu         make tiny.bundle
  k3tvm verify tiny.bundle                compare its logits with the torch reference
  k3tvm generate tiny.bundle --ids 1,2,3  continue a prompt
  k3tvm COMMAND --help                    more about one command

exit status: 0 done, 1 a check failed, 2 wrong use or unusable input (one line says why)
"""


class OneLineParser(argparse.ArgumentParser):
    """Reports wrong use on one line and exits 2, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit 2."""
        self.exit(2, f"error: {message}; see '{self.prog} --help'\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands of COMMANDS registered."""
    parser = OneLineParser(
        prog="k3tvm",
        description="Ahead-of-time compiler and runtime for the Kimi K3 family.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"k3tvm {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"k3tvm.cli.{name}").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its status, 2 for errors, 130 when interrupted."""
    try:
        with _interrupts_kept():
            return _run(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away. What is still buffered must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder without permission
        print(f"error: {error}", file=sys.stderr)
        return 2


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt even where TVM, called back by Python, made another error of it."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another handler's business, or a command inside a command
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        if seen:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    try:
        status = int(args.run(args))
    except K3Error as error:
        _flush()
        print(f"error: {error}", file=sys.stderr)
        return 2
    _flush()
    return status


def _flush() -> None:
    """Print what is buffered; a process that was started without a standard output has none."""
    if sys.stdout:
        sys.stdout.flush()
