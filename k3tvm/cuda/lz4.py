"""Undoes LZ4's block format, with which PTX is packed in a fat binary."""

from __future__ import annotations

LEAST = 4  # bytes of a repetition


def decompress(data: bytes, size: int) -> bytes:
    """The `size` bytes that were packed into `data`; ValueError when it does not unpack to that.

    A block is a row of literal bytes, each followed by a repetition of bytes that stand a given
    distance back; the last has no repetition.
    """
    out, at = bytearray(), 0
    while at < len(data):
        token = data[at]
        count, at = _length(data, at + 1, token >> 4)
        out += data[at : at + count]
        at += count
        if at >= len(data):
            break
        distance = data[at] | data[at + 1] << 8
        count, at = _length(data, at + 2, token & 15)
        _repeat(out, distance, count + LEAST)
    if len(out) != size:
        raise ValueError(f"{len(out)} bytes come out of a packed image of {size}")
    return bytes(out)


def _length(data: bytes, at: int, start: int) -> tuple[int, int]:
    """A length that goes on in further bytes while they are 255, and where it ends."""
    if start == 15:
        while data[at] == 255:
            start, at = start + 255, at + 1
        start, at = start + data[at], at + 1
    return start, at


def _repeat(out: bytearray, distance: int, count: int) -> None:
    """Append bytes from `distance` back; they overlap with what is appended if it is short."""
    if not 0 < distance <= len(out):
        raise ValueError("a repetition begins before the start")
    begin = len(out) - distance
    pattern = bytes(out[begin : begin + min(distance, count)])
    out += (pattern * (count // len(pattern) + 1))[:count]
