"""Turns one JSON object into checked values, and knows which of its fields nobody read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

from k3tvm.errors import ConfigError

T = TypeVar("T")
Kind = Callable[[object], T]
LARGEST_INT = 2**31 - 1


def natural(value: object) -> int:
    """A whole number from 0; `true` is not a number."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_INT:
        raise ValueError(f"must be a whole number from 0 to {LARGEST_INT}")
    return value


def positive(value: object) -> int:
    """A whole number from 1."""
    if natural(value) == 0:
        raise ValueError("must be at least 1")
    return natural(value)


def boolean(value: object) -> bool:
    """`true` or `false`; 0 and 1 are not accepted."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def finite(value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ValueError("must be a finite number")
    return float(value)


def above_zero(value: object) -> float:
    """A finite number greater than 0."""
    if finite(value) <= 0:
        raise ValueError("must be greater than 0")
    return finite(value)


def below_zero(value: object) -> float:
    """A finite number less than 0."""
    if finite(value) >= 0:
        raise ValueError("must be less than 0")
    return finite(value)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """The kind, or null."""
    return lambda value: None if value is None else kind(value)


def only(*allowed: T) -> Kind[T]:
    """One of the listed values; types must agree too, so that 1 is not `true`."""

    def check(value: object) -> T:
        for item in allowed:
            if value == item and isinstance(value, bool) == isinstance(item, bool):
                return item
        names = " or ".join(_json_text(item) for item in allowed)
        raise ValueError(f"is not implemented, only {names} is")

    return check


class Fields:
    """One JSON object under reading; `where` is put in front of every message."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.read: set[str] = set()

    def take(self, name: str, kind: Kind[T]) -> T:
        """The value of a required field; absent or of the wrong kind is a ConfigError."""
        self.need(name)
        return self._checked(name, kind)

    def need(self, name: str) -> None:
        """Refuse an object without this field."""
        if name not in self.values:
            cure = "add the field; it is not guessed, because a wrong guess changes the logits"
            raise ConfigError(f"required field {name!r} is absent", where=self.where, cure=cure)

    def take_or(self, name: str, kind: Kind[T], default: T) -> T:
        """The value of a field that may be absent or null, both of which mean `default`."""
        self.read.add(name)
        return default if self.values.get(name) is None else self._checked(name, kind)

    def take_object(self, name: str) -> Fields | None:
        """A nested object under its own reader, or None when the field is absent or null."""
        self.read.add(name)
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
        return Fields(value, f"{self.where}: {name}")

    def refuse(self, name: str, reason: str, cure: str = "") -> NoReturn:
        """Raise a ConfigError about this field with its value."""
        shown = f"{name!r}" + (f" = {_json_text(self.values[name])}" if name in self.values else "")
        raise ConfigError(f"field {shown} {reason}", where=self.where, cure=cure)

    def finish(self, inert: Collection[str]) -> None:
        """Refuse, by name, every field that was neither read nor is known to be inert."""
        unknown = [name for name in self.values if name not in self.read and name not in inert]
        if unknown:
            more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
            raise ConfigError(
                f"unknown field {', '.join(map(repr, unknown[:4]))}{more}",
                where=self.where,
                cure="its effect on the model is not known; remove it if it has none",
            )

    def _checked(self, name: str, kind: Kind[T]) -> T:
        self.read.add(name)
        try:
            return kind(self.values[name])
        except ValueError as fault:
            shown = f"{name!r} = {_json_text(self.values[name])}"
            raise ConfigError(f"field {shown} {fault}", where=self.where) from None


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _json_text(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
