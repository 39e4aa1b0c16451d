"""Times of work on an NVIDIA GPU, by CUDA events on the default stream, and its rate of copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from k3tvm.errors import DeviceError

COPIED = 1 << 30  # bytes
REPEATS = 10


class Clock:
    """CUDA events through libcudart, on the stream to which TVM and torch send their work."""

    def __init__(self, cudart: Any) -> None:
        self.cudart = cudart

    def mark(self) -> ctypes.c_void_p:
        """An event behind all work that was sent so far."""
        event = ctypes.c_void_p()
        self._call("cudaEventCreate", ctypes.byref(event))
        self._call("cudaEventRecord", event, None)
        return event

    def between(self, start: ctypes.c_void_p, stop: ctypes.c_void_p) -> float:
        """Seconds from one event to the other, which this waits for; both are gone then."""
        milliseconds = ctypes.c_float()
        self._call("cudaEventSynchronize", stop)
        self._call("cudaEventElapsedTime", ctypes.byref(milliseconds), start, stop)
        for event in (start, stop):
            self._call("cudaEventDestroy", event)
        return milliseconds.value / 1e3

    def seconds(self, work: Callable[[], object], calls: int = 1) -> float:
        """Seconds of one call, of `calls` in a row."""
        start = self.mark()
        for _ in range(calls):
            work()
        return self.between(start, self.mark()) / calls

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.cudart, name)(*arguments):
            raise DeviceError(f"{name} fails with error {code}", where="CUDA")


def copy_rate(clock: Clock, memory: Any) -> float:
    """Bytes read and written per second by the device's own copy, the best of several."""
    source, to = (memory.empty((COPIED,), "uint8") for _ in range(2))
    times = [clock.seconds(lambda: memory.copy(to, 0, source, 0, COPIED)) for _ in range(REPEATS)]
    return 2 * COPIED / min(times)
