"""Absorbed queries and the latent cache into attention outputs: the kernel of `MlaAttention`.

All heads share one cache row per position, so the queries of a sequence are a plain list of
(row, head) pairs. A task takes 16 consecutive pairs, one per vector lane:

    scores   lanes are pairs: the queries are transposed once, cache values are broadcast
    softmax  lanes are pairs: no step crosses lanes
    sum      lanes are columns of the cache row, probabilities are broadcast

Every pair sees the same operations in the same order whatever shares its task: keys come in blocks
of KEYS, blocks in spans of SPAN keys with a softmax of their own, spans are merged in order. So the
result of a row depends on nothing but the row and its past, to the last bit. Keys after a pair's
position are never read into its sum. Few long sequences are split: spans become tasks, their sums
are merged in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import MlaAttention
from k3tvm.schedules import vector as v
from k3tvm.schedules.mla_steps import (
    Factors,
    absorb,
    add_sums,
    add_values,
    clear_softmax,
    clear_sums,
    merge_softmaxes,
    new_softmax,
    round_shares,
    score_keys,
    write_out,
)
from k3tvm.schedules.mla_tasks import PAIRS, Cells, Task, balanced, sizes, task_of, with_queries
from k3tvm.schedules.profile import CpuProfile

KEYS = 48  # keys of one online-softmax step; their cache rows stay in the second-level cache
SPAN = 10 * KEYS  # keys with a softmax of their own, and of one task where sequences are split
SPLIT_BELOW = 16  # blocks of pairs that keep every thread busy without a split
PARTS = 64  # spans in flight where sequences are split, over all blocks


def attention(op: MlaAttention, p: CpuProfile, a: SimpleNamespace) -> None:
    """Tasks of 16 pairs in parallel, each over all its keys; few long sequences are split."""
    blocks, longest = sizes(op, a)
    with T.If(T.And(blocks < v.int64(SPLIT_BELOW), longest > v.int64(SPAN))):
        with T.Then():
            _split_sequences(op, p, a, blocks, (longest + (SPAN - 1)) // SPAN)
        with T.Else():
            _whole_sequences(op, p, a, blocks)


def _whole_sequences(op: MlaAttention, p: CpuProfile, a: SimpleNamespace, blocks: Any) -> None:
    with v.parallel(blocks) as index:
        task = with_queries(task_of(op, p, a, balanced(index, blocks)))
        total, softmax = Cells(v.workspace((PAIRS, op.rank))), new_softmax()
        clear_sums(task, total)
        if op.act != "float32":
            _attend_exact(task, softmax, total)
        else:
            _attend_online(task, softmax, total)
        write_out(task, softmax, total)


def _split_sequences(
    op: MlaAttention, p: CpuProfile, a: SimpleNamespace, blocks: Any, spans: Any
) -> None:
    """As many spans at a time as there are parts, then their merge, block by block and in order."""
    at_once = v.opaque(T.min(PARTS // blocks, spans))
    parts = v.workspace((PARTS, PAIRS, op.rank))
    part_softmax = v.workspace((PARTS, 2, PAIRS))
    totals = v.workspace((SPLIT_BELOW, PAIRS, op.rank))
    total_softmax = v.workspace((SPLIT_BELOW, 2, PAIRS))
    with v.serial(blocks) as block:
        clear_softmax(Cells(total_softmax, (block,)))
        clear_sums(task_of(op, p, a, block), Cells(totals, (block,)))

    def rounds(attend: Callable[..., None], merge: Callable[..., None]) -> None:
        with v.serial((spans + (at_once - 1)) // at_once) as turn:
            with v.parallel(blocks * at_once) as i:
                block, span = v.opaque(i // at_once), v.opaque(turn * at_once + i % at_once)
                task = task_of(op, p, a, block)
                with T.If(span * SPAN < task.many), T.Then():
                    whole = Cells(total_softmax, (block,))
                    attend(
                        with_queries(task),
                        span,
                        Cells(part_softmax, (i,)),
                        Cells(parts, (i,)),
                        whole,
                    )
            with v.parallel(blocks) as block:
                task, factors = task_of(op, p, a, block), Factors.ones()
                with v.serial(at_once) as k:
                    with T.If((turn * at_once + k) * SPAN < task.many), T.Then():
                        i = v.opaque(block * at_once + k)
                        merge(task, factors, Cells(part_softmax, (i,)), Cells(parts, (i,)), block)

    def online(task: Task, span: Any, softmax: Cells, part: Cells, whole: Cells) -> None:
        _span_online(task, span, softmax, part, Cells(v.workspace((KEYS, PAIRS))))

    def statistics(task: Task, span: Any, softmax: Cells, part: Cells, whole: Cells) -> None:
        _span_statistics(task, span, softmax, Cells(v.workspace((KEYS, PAIRS))), None)

    def exact(task: Task, span: Any, softmax: Cells, part: Cells, whole: Cells) -> None:
        _span_exact(task, span, whole, part, Cells(v.workspace((KEYS, PAIRS))), None)

    def merge_softmax(task: Task, f: Factors, softmax: Cells, part: Cells, block: Any) -> None:
        merge_softmaxes(task, Cells(total_softmax, (block,)), softmax, f)

    def merge_sums(task: Task, f: Factors, softmax: Cells, part: Cells, block: Any) -> None:
        add_sums(task, Cells(totals, (block,)), part, f)

    def merge_both(*given: Any) -> None:
        merge_softmax(*given)
        merge_sums(*given)

    if op.act != "float32":
        rounds(statistics, merge_softmax)
        rounds(exact, merge_sums)
    else:
        rounds(online, merge_both)
    with v.parallel(blocks) as block:
        write_out(task_of(op, p, a, block), Cells(total_softmax, (block,)), Cells(totals, (block,)))


def _attend_online(t: Task, softmax: Cells, total: Cells) -> None:
    """float32: one pass over the cache; sums are rescaled when a larger score turns up."""
    scores, part = Cells(v.workspace((KEYS, PAIRS))), Cells(v.workspace((PAIRS, t.op.rank)))
    span_softmax, factors = new_softmax(), Factors.ones()
    with _spans(t) as span:
        _span_online(t, span, span_softmax, part, scores)
        merge_softmaxes(t, softmax, span_softmax, factors)
        add_sums(t, total, part, factors)


def _attend_exact(t: Task, softmax: Cells, total: Cells) -> None:
    """bfloat16: probabilities are rounded, so the softmax is finished before any is used."""
    # As long as the cache: TVM moves an allocation above the binding of `many`.
    scores = Cells(v.workspace(((t.a.cap + (KEYS - 1)) // KEYS * KEYS, PAIRS)))
    part = Cells(v.workspace((PAIRS, t.op.rank)))
    span_softmax, factors = new_softmax(), Factors.ones()
    with _spans(t) as span:
        _span_statistics(t, span, span_softmax, scores, span)
        merge_softmaxes(t, softmax, span_softmax, factors)
    ones = Factors.ones()
    with _spans(t) as span:
        _span_exact(t, span, softmax, part, scores, span)
        add_sums(t, total, part, ones)


def _span_online(t: Task, span: Any, softmax: Cells, part: Cells, scores: Cells) -> None:
    """The softmax and the sum of one span's keys, starting from nothing."""
    keep = v.scratch(PAIRS)
    clear_softmax(softmax)
    clear_sums(t, part)
    with _blocks(t, span) as block:
        start, keys = _keys(t, span, block)
        score_keys(t, start, keys, scores, v.int64(0))
        absorb(t, softmax, keys, scores, v.int64(0), keep, shares=True)
        add_values(t, start, keys, scores, v.int64(0), keep, part)


def _span_statistics(t: Task, span: Any, softmax: Cells, scores: Cells, kept: Any) -> None:
    """The softmax of one span's keys alone; their scores are kept if `kept` is the span."""
    keep = v.scratch(PAIRS)
    clear_softmax(softmax)
    with _blocks(t, span) as block:
        start, keys = _keys(t, span, block)
        at = v.int64(0) if kept is None else start
        score_keys(t, start, keys, scores, at)
        absorb(t, softmax, keys, scores, at, keep, shares=False)


def _span_exact(t: Task, span: Any, softmax: Cells, part: Cells, scores: Cells, kept: Any) -> None:
    """The sum of one span's keys under the finished softmax; scores come again unless kept."""
    ones = Factors.ones()
    clear_sums(t, part)
    with _blocks(t, span) as block:
        start, keys = _keys(t, span, block)
        at = v.int64(0) if kept is None else start
        if kept is None:
            score_keys(t, start, keys, scores, at)
        round_shares(t, softmax, keys, scores, at)
        add_values(t, start, keys, scores, at, ones.keep, part)


def _spans(t: Task) -> Any:
    return v.serial((t.many + (SPAN - 1)) // SPAN)


def _blocks(t: Task, span: Any) -> Any:
    keys = T.min(t.many - span * SPAN, v.int64(SPAN))
    return v.serial((keys + (KEYS - 1)) // KEYS)


def _keys(t: Task, span: Any, block: Any) -> tuple[Any, Any]:
    """First key of a block and how many of it some pair may see."""
    start = v.opaque(span * SPAN + block * KEYS)
    return start, v.opaque(T.min(t.many - start, v.int64(KEYS)))
