"""Logits into token ids on a GPU: one workgroup per row, no sort.

The thresholds of top-k and top-p are found digit by digit in integers that order as the logits do:
each thread adds up weights per digit in its own column of shared memory, so there are no atomic
operations and every sum has one order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Sample
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.sampling_draw import draw
from k3tvm.schedules.gpu.sampling_row import (
    BINS,
    BITS,
    SEGMENT,
    THREADS,
    Cut,
    Row,
    each_logit,
    key_of,
    logit_of,
)
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule
from k3tvm.schedules.sampling import NOTHING, TEMPERATURE, TOP_P

LAST = 2**31 - 1


@schedule(Sample, "gpu", "a workgroup per row; thresholds by a radix search, no sort")
def sample_gpu(op: Sample, p: GpuProfile, a: SimpleNamespace) -> None:
    """The largest logit; where a draw is wanted, the thresholds, then the draw."""
    if p.threads < THREADS:
        raise Refusal(f"requires workgroups of {THREADS} threads, got {p.threads}")
    with g.groups(a.m, THREADS) as (group, tid):
        row = g.variable(group)[0]  # else TVM multiplies 32768 workgroups by the vocabulary
        columns, partial, totals = g.shared(BINS * THREADS), g.shared(THREADS), g.shared(BINS)
        keys = g.shared(THREADS, "int32")
        top, token = _largest(op, a, row, tid, keys)
        temperature = g.let(a.controls[row, TEMPERATURE])
        wanted = T.And(temperature > g.floats(0.0), top > T.int32(NOTHING))
        with T.If(wanted):
            with T.Then():
                r = Row(op, a, row, tid, logit_of(top), temperature, columns, partial, totals)
                draw(r, _top_p(r, _top_k(r)), keys)
            with T.Else(), g.when(tid == T.int32(0)):
                g.store(a.ids, token, row)


def _largest(op: Sample, a: SimpleNamespace, row: Any, tid: Any, keys: Any) -> tuple[Any, Any]:
    """(key, id) of the largest logit, the lowest id on a tie; id 0 where all are NaN."""
    best, at = g.variable(NOTHING, "int32"), g.variable(0, "int32")
    with each_logit(op, a, row, tid) as (i, x):
        key = key_of(x)
        with g.when(key > best[0]):
            g.put(best, key)
            g.put(at, i)
    g.store(keys, best[0], tid)
    top = g.variable(g.max_of(keys, tid, THREADS))
    behind = T.Select(best[0] == top[0], -at[0], T.int32(-LAST))
    g.store(keys, behind, tid)
    token = g.variable(-g.max_of(keys, tid, THREADS))
    return top[0], token[0]


def _top_k(r: Row) -> Cut:
    """What top-k keeps; without top-k all keys are above the cut."""
    cut, ties, equals = (g.variable(v, "int32") for v in (NOTHING, 0, 1))
    k = g.let(r.a.top_k[r.row])
    with g.when(T.And(k > T.int32(0), k < T.int32(r.op.vocab))):
        target = g.let(g.cast(k, "float32"))
        key, above, total = _search(r, target, lambda x, key: g.floats(1.0))
        g.put(cut, key)
        g.put(ties, g.cast(target - above, "int32"))
        g.put(equals, g.cast(total, "int32"))
    return Cut(cut[0], ties[0], equals[0])


def _top_p(r: Row, first: Cut) -> Cut:
    """What top-p keeps of what is kept; those tied at the first cut share the mass of its ties."""
    cut, ties = g.variable(first.key, "int32"), g.variable(first.ties, "int32")
    nucleus = g.let(r.a.controls[r.row, TOP_P])
    with g.when(nucleus < g.floats(1.0)):
        part = g.let(g.cast(first.ties, "float32") / g.cast(first.equals, "float32"))

        def weight(x: Any, key: Any) -> Any:
            kept = T.Select(key == first.key, part, g.floats(1.0))
            return g.let(T.Select(key < first.key, g.floats(0.0), kept) * r.mass(x))

        total = g.variable(0.0)
        with each_logit(r.op, r.a, r.row, r.tid) as (_, x):
            g.put(total, total[0] + weight(x, key_of(x)))
        g.store(r.partial, total[0], r.tid)
        target = g.let(nucleus * g.sum_of(r.partial, r.tid, THREADS))
        key, above, _ = _search(r, target, weight)
        most = T.Select(key == first.key, first.ties, T.int32(r.op.vocab))
        g.put(ties, _rounded_up(g.let((target - above) / r.mass(logit_of(key))), most))
        g.put(cut, key)
    return Cut(cut[0], ties[0])


def _rounded_up(value: Any, most: Any) -> Any:
    """`value` as int32, rounded up, from 1 to `most`; `most` if it is not a number."""
    limit = g.let(g.cast(most, "float32"))
    value = g.let(T.Select(value < limit, value, limit))
    whole = g.let(g.cast(value, "int32"))
    more = T.Select(g.cast(whole, "float32") < value, T.int32(1), T.int32(0))
    return g.let(T.max(whole + more, T.int32(1)))


def _search(r: Row, target: Any, weight: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]:
    """(key, above, total): the key where the sum of weights over descending keys reaches `target`.

    above: the weights of larger keys; total: of the tokens that have the key.
    """
    prefix, above, total = g.variable(0, "uint32"), g.variable(0.0), g.variable(0.0)
    with g.serial(32 // BITS) as level:
        shift = g.let(g.cast(T.int32(32 - BITS) - level * T.int32(BITS), "uint32"))
        with g.serial(BINS) as b:
            g.store(r.columns, g.floats(0.0), b * T.int32(THREADS) + r.tid)
        with each_logit(r.op, r.a, r.row, r.tid) as (_, x):
            key = key_of(x)
            code = g.let(T.bitwise_xor(g.bits(key, "uint32"), T.uint32(0x80000000)) >> shift)
            other = T.bitwise_xor(code >> T.uint32(BITS), prefix[0])
            with g.when(g.bits(other, "int32") == T.int32(0)):
                digit = g.cast(T.bitwise_and(code, T.uint32(BINS - 1)), "int32")
                at = g.let(digit * T.int32(THREADS) + r.tid)
                g.store(r.columns, r.columns[at] + weight(x, key), at)
        _add_columns(r)
        digit = _choose_digit(r, target, above, total)
        g.put(prefix, T.bitwise_or(prefix[0] << T.uint32(BITS), g.cast(digit, "uint32")))
    key = g.bits(T.bitwise_xor(prefix[0], T.uint32(0x80000000)), "int32")
    return g.variable(key)[0], g.let(above[0]), g.let(total[0])


def _add_columns(r: Row) -> None:
    """totals[bin] = the sum of all threads' columns, in a fixed order."""
    g.barrier()
    place, part = g.let(r.tid // T.int32(SEGMENT)), g.let(r.tid % T.int32(SEGMENT))
    total = g.variable(0.0)
    with g.serial(THREADS // SEGMENT) as j:
        at = place * T.int32(THREADS) + j * T.int32(SEGMENT) + part
        g.put(total, total[0] + r.columns[at])
    g.store(r.partial, total[0], r.tid)
    g.barrier()
    with g.when(r.tid < T.int32(BINS)):
        g.put(total, g.floats(0.0))
        with g.serial(SEGMENT) as j:
            g.put(total, total[0] + r.partial[r.tid * T.int32(SEGMENT) + j])
        g.store(r.totals, total[0], r.tid)
    g.barrier()


def _choose_digit(r: Row, target: Any, above: Any, total: Any) -> Any:
    """The highest digit with which the sum reaches the target, else the last that has weight."""
    running, digit = g.variable(above[0]), g.variable(0, "int32")
    open_ = g.variable(1, "int32")
    with g.serial(BINS) as b:
        at = g.let(T.int32(BINS - 1) - b)
        here = g.let(r.totals[at])
        with g.when(T.And(open_[0] == T.int32(1), here > g.floats(0.0))):
            g.put(digit, at)
            g.put(above, running[0])
            g.put(total, here)
            g.put(running, running[0] + here)
            with g.when(running[0] >= target):
                g.put(open_, T.int32(0))
    return digit[0]
