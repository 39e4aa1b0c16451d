"""Turns a user's mistake into one line: what is wrong, where, and how to cure it."""

from __future__ import annotations


class K3Error(Exception):
    """Base of every error that a user can cause and cure; the command line exits 2 on it.

    `what` states the fault, `where` names the file, field, tensor or device, `cure` the way out.
    `str(error)` is always a single line: "where: what; cure".
    """

    def __init__(self, what: str, *, where: str = "", cure: str = "") -> None:
        self.what = _one_line(what)
        self.where = _one_line(where)
        self.cure = _one_line(cure)
        head = f"{self.where}: {self.what}" if self.where else self.what
        super().__init__(f"{head}; {self.cure}" if self.cure else head)


class ConfigError(K3Error):
    """`config.json` cannot be read, contradicts itself, or asks for what is not implemented."""


class CheckpointError(K3Error):
    """Checkpoint files are damaged, incomplete, or do not fit their configuration."""


class TargetError(K3Error):
    """A compile target is unknown, its tools are absent, or a kernel exceeds its limits."""


class BundleError(K3Error):
    """A compiled bundle is damaged, incomplete, or of another version."""


class DeviceError(K3Error):
    """The device that was asked for is absent or lacks a needed feature."""


class NumericsError(K3Error):
    """A computation produced NaN or infinity."""


def _one_line(text: str) -> str:
    return " ".join(text.split())
