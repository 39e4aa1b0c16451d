"""Turns the number of a workgroup into a chunk of rows of one sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.gpu import grid as g


def most_chunks(a: SimpleNamespace, rows: int) -> Any:
    """How many chunks of `rows` rows there are at most: one per sequence is not full."""
    return g.let(a.n // T.int32(rows) + a.m)


def find_chunk(a: SimpleNamespace, chunk: Any, rows: int) -> tuple[Any, Any]:
    """Variables: the sequence that has the chunk of this number, or -1; the number within it.

    Chunks are numbered through all sequences in the order of `seqs`. The loop is over sequences
    and the same for all threads of a workgroup where `chunk` is.
    """
    sequence, rest = g.variable(-1, "int32"), g.variable(chunk)
    with g.serial(a.m) as s:
        chunks = g.let((a.seqs[s, T.int32(2)] + T.int32(rows - 1)) // T.int32(rows))
        with g.when(sequence[0] < T.int32(0)), T.If(rest[0] < chunks):
            with T.Then():
                g.put(sequence, s)
            with T.Else():
                g.put(rest, rest[0] - chunks)
    return sequence, rest
