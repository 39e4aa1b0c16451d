"""Turns a long list of names into a short text: the first few, and how many more."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first `limit` names and the count of the rest."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
