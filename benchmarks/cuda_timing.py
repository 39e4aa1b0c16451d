"""Several works are timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any


def in_turn(
    clock: Any, works: dict[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, float]:
    """Median seconds of each, measured in turn, so that all see the same clocks and heat."""
    for work in works.values():
        clock.seconds(work, 3)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(clock.seconds(work, calls))
    return {name: median(values) for name, values in times.items()}
