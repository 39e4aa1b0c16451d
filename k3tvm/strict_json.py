"""Turns JSON text into a dict, refusing what a lenient reader would silently accept."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from k3tvm.errors import K3Error


class _Refused(ValueError):
    """The text is JSON for a lenient reader only."""


def parse_object(text: str | bytes, where: str, error: type[K3Error]) -> dict[str, Any]:
    """Parse one JSON object; doubled keys, NaN and non-objects raise `error` naming `where`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except _Refused as fault:
        raise error(str(fault), where=where, cure="repair the file or download it again") from None
    except (ValueError, RecursionError) as fault:
        raise error(
            f"not valid JSON ({fault})", where=where, cure="download the file again"
        ) from None
    if not isinstance(value, dict):
        raise error("must hold a JSON object", where=where, cure="check that it is the right file")
    return value


def read_object(path: Path, error: type[K3Error]) -> dict[str, Any]:
    """Read a `.json` or `.json.gz` file that holds one object; every failure raises `error`."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError:
        raise error("no such file", where=str(path), cure="check the path") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise error("damaged gzip file", where=str(path), cure="download it again") from None
    except OSError as fault:
        cure = "check the path and its permissions"
        raise error(f"cannot be read ({fault.strerror})", where=str(path), cure=cure) from None
    return parse_object(text, str(path), error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        double, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _Refused(f"key {double!r} stands there twice")
    return found


def _no_constant(name: str) -> None:
    raise _Refused(f"{name} is not a JSON number")
