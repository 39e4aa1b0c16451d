"""Sorts the pairs (row, choice) of a call by expert: stable, without atomic operations.

Few pairs: each counts those before it. Many: a workgroup counts the experts of its chunk of pairs,
sums over the chunks before it follow, then each workgroup puts its pairs in their places. Every
counter belongs to one thread, so the order is always the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ExpertSort
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule

Expr = Any

ALONE = 2048  # pairs up to which each counts for itself
CHUNK = 512  # pairs of a workgroup
THREADS = 256


@schedule(ExpertSort, "gpu", "few pairs: each counts those before it; many: counted in chunks")
def expert_sort_gpu(op: ExpertSort, p: GpuProfile, a: SimpleNamespace) -> None:
    """The path depends on the number of rows alone."""
    with T.If(a.n * T.int32(op.top_k) <= T.int32(ALONE)):
        with T.Then():
            _alone(op, a)
        with T.Else():
            chunks = (a.n * T.int32(op.top_k) + T.int32(CHUNK - 1)) // T.int32(CHUNK)
            counts = g.workspace((chunks, op.experts), "int32")
            totals = g.workspace((op.experts,), "int32")
            _count(op, a, chunks, counts)
            _add_up(op, chunks, counts, totals)
            _place(op, a, chunks, counts, totals)


def _alone(op: ExpertSort, a: SimpleNamespace) -> None:
    """A pair's place is the number of pairs of lower experts, and of earlier ones of its own.

    first[e] is the number of pairs of lower experts alone.
    """
    pairs = g.let(a.n * T.int32(op.top_k))
    with g.each(pairs + T.int32(op.experts + 1)) as item:
        is_pair = item < pairs
        expert, me = g.variable(item - pairs, "int32"), g.variable(-1, "int32")
        with g.when(is_pair):
            g.put(expert, _at(op, a.chosen, item))
            g.put(me, item)
        before = g.variable(0, "int32")
        with g.serial(a.n) as row, g.serial(op.top_k) as choice:
            earlier = row * T.int32(op.top_k) + choice < me[0]
            limit = expert[0] + T.Select(earlier, T.int32(1), T.int32(0))
            one = T.Select(a.chosen[row, choice] < limit, T.int32(1), T.int32(0))
            g.put(before, before[0] + one)
        with T.If(is_pair):
            with T.Then():
                _store(op, a, before[0], item)
            with T.Else():
                g.store(a.first, before[0], item - pairs)


def _count(op: ExpertSort, a: SimpleNamespace, chunks: Expr, counts: Any) -> None:
    """counts[c, e] = pairs of expert e in chunk c."""
    with g.groups(chunks, THREADS) as (chunk, tid):
        experts, pairs = _chunk(op, a, chunk, tid)
        owned = [g.let(tid + T.int32(i * THREADS)) for i in range(_mine(op))]
        cells = [g.variable(0, "int32") for _ in owned]
        with g.serial(pairs) as j:
            expert = T.Bind(experts[j])
            for own, cell in zip(owned, cells, strict=True):
                g.put(cell, cell[0] + T.Select(expert == own, T.int32(1), T.int32(0)))
        for own, cell in zip(owned, cells, strict=True):
            with g.when(own < T.int32(op.experts)):
                g.store(counts, cell[0], chunk, own)


def _add_up(op: ExpertSort, chunks: Expr, counts: Any, totals: Any) -> None:
    """counts[c, e] = pairs of expert e in the chunks before c, totals[e] = in all."""
    with g.each(op.experts, 32) as expert:
        total = g.variable(0, "int32")
        with g.serial(chunks) as chunk:
            here = T.Bind(counts[chunk, expert])
            g.store(counts, total[0], chunk, expert)
            g.put(total, total[0] + here)
        g.store(totals, total[0], expert)


def _place(op: ExpertSort, a: SimpleNamespace, chunks: Expr, counts: Any, totals: Any) -> None:
    """Put the pairs of each chunk in their places; the first workgroup also writes `first`."""
    with g.groups(chunks, THREADS) as (chunk, tid):
        firsts = g.shared(op.experts + 1, "int32")
        experts, pairs = _chunk(op, a, chunk, tid)
        _firsts(op, totals, firsts, tid)
        with g.when(chunk == T.int32(0)), g.strided(tid, op.experts + 1, THREADS) as expert:
            first = T.Bind(firsts[expert])
            g.store(a.first, first, expert)
        for i in range(_mine(op)):
            own = g.let(tid + T.int32(i * THREADS))
            with g.when(own < T.int32(op.experts)):
                start = T.Bind(firsts[own])
                place = g.variable(start + counts[chunk, own], "int32")
                with g.serial(pairs) as j:
                    expert = T.Bind(experts[j])
                    with g.when(expert == own):
                        _store(op, a, g.let(place[0]), g.let(chunk * T.int32(CHUNK) + j))
                        g.put(place, place[0] + T.int32(1))


def _firsts(op: ExpertSort, totals: Any, firsts: Any, tid: Expr) -> None:
    """firsts[e] = pairs of the experts before e, in shared memory; a thread has a run of them."""
    sums = g.shared(THREADS, "int32")
    run = -(-(op.experts + 1) // THREADS)
    begin = g.let(tid * T.int32(run))
    own, before = g.variable(0, "int32"), g.variable(0, "int32")
    with g.serial(run) as i:
        with g.when(begin + i < T.int32(op.experts)):
            g.put(own, own[0] + totals[begin + i])
    g.store(sums, own[0], tid)
    g.barrier()
    with g.serial(tid) as other:
        one = T.Bind(sums[other])
        g.put(before, before[0] + one)
    with g.serial(run) as i:
        expert = g.let(begin + i)
        with g.when(expert <= T.int32(op.experts)):
            g.store(firsts, before[0], expert)
        with g.when(expert < T.int32(op.experts)):
            g.put(before, before[0] + totals[expert])
    g.barrier()


def _chunk(op: ExpertSort, a: SimpleNamespace, chunk: Expr, tid: Expr) -> tuple[Any, Expr]:
    """The experts of a chunk's pairs, in shared memory, and how many they are."""
    experts, first = g.shared(CHUNK, "int32"), g.let(chunk * T.int32(CHUNK))
    # not known to compilers, which would unroll loops over all of a chunk
    pairs = g.let(T.min(a.n * T.int32(op.top_k) - first, T.int32(CHUNK)))
    with g.strided(tid, pairs, THREADS) as j:
        pair = g.let(first + j)
        expert = _at(op, a.chosen, pair)
        g.store(experts, expert, j)
    g.barrier()
    return experts, pairs


def _mine(op: ExpertSort) -> int:
    """Experts of a thread: its number, + THREADS, ..."""
    return -(-op.experts // THREADS)


def _store(op: ExpertSort, a: SimpleNamespace, place: Expr, pair: Expr) -> None:
    at = g.let(place)
    g.store(a.order, pair, at // T.int32(op.top_k), at % T.int32(op.top_k))


def _at(op: ExpertSort, table: Any, i: Expr) -> Expr:
    """Element i of a table [n, top_k]."""
    return table[i // T.int32(op.top_k), i % T.int32(op.top_k)]
