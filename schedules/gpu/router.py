"""Router logits into the chosen experts and their weights on a GPU: one workgroup per row.

There is no sort and no loop over the choices. Each thread holds a few neighbouring experts. The
experts that win are in the threads whose best ones win among the best of all threads, so those
threads' experts are the candidates, and the place of a candidate is how many others precede it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Router
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule
from k3tvm.schedules.router import NOT_A_NUMBER, OUTSIDE, TAKEN

HELD = 4  # experts of one thread, where there are enough threads
MOST_HELD = 16  # they are in registers


@dataclass(frozen=True)
class Row:
    """One workgroup's row: thread `tid` of `threads` holds experts tid * held + (0, 1, ...).

    scores [threads * held]: sigmoids, in shared memory. ranks [held]: this thread's, as integers.
    """

    op: Router
    a: SimpleNamespace
    row: Any
    tid: Any
    threads: int
    held: int
    scores: Any
    ranks: Any

    def expert(self, i: int) -> Any:
        """The number of the thread's expert `i`."""
        return self.tid * T.int32(self.held) + T.int32(i)


@schedule(Router, "gpu", "a workgroup per row; the place of an expert is the number before it")
def router_gpu(op: Router, p: GpuProfile, a: SimpleNamespace) -> None:
    """Ranks, groups masked, candidates, their places, weights."""
    if op.top_k > op.experts:
        raise Refusal(f"requires top_k <= experts, got {op.top_k} > {op.experts}")
    if op.experts % op.groups:
        raise Refusal(f"requires experts in equal groups, got {op.experts} in {op.groups}")
    threads = g.threads_for(p, -(-op.experts // HELD))
    held = -(-op.experts // threads)
    if held > MOST_HELD:
        raise Refusal(f"requires at most {MOST_HELD * threads} experts, got {op.experts}")
    if op.groups > threads and op.groups > op.keep:
        raise Refusal(f"requires at most {threads} groups of experts, got {op.groups}")
    with g.groups(a.n, threads) as (row, tid):
        scores = g.shared(threads * held)
        r = Row(op, a, row, tid, threads, held, scores, g.local(held, "int32"))
        bests = g.shared(threads, "int32")
        winners = min(op.top_k, threads)
        keys, experts = (g.shared(winners * held, "int32") for _ in range(2))
        chosen = g.shared(op.top_k, "int32")
        sums = g.shared(op.groups) if op.groups > op.keep else None
        _rank(r)
        if sums is not None:
            _mask_groups(r, sums)
        _candidates(r, bests, winners, keys, experts)
        _choose(r, winners * held, keys, experts, chosen)
        _weigh(r, chosen)


def _rank(r: Row) -> None:
    """Sigmoids into shared memory; biased ones as integers into registers."""
    for i in range(r.held):
        e = g.let(r.expert(i))
        g.put(r.ranks, T.int32(TAKEN), i)
        with g.when(e < T.int32(r.op.experts)):
            score = g.let(f.sigmoid(r.a.x[r.row, e]))
            g.store(r.scores, score, e)
            g.put(r.ranks, _rank_of(g.let(score + r.a.bias[e])), i)
    g.barrier()


def _rank_of(pick: Any) -> Any:
    """An int32 that orders as the float does; negative floats have their magnitude bits flipped."""
    raw = g.let(g.bits(pick, "int32"))
    magnitude = T.int32(0x7FFFFFFF)
    rank = T.bitwise_xor(raw, T.bitwise_and(raw >> T.int32(31), magnitude))
    is_nan = T.bitwise_and(raw, magnitude) > T.int32(0x7F800000)
    return T.Select(is_nan, T.int32(NOT_A_NUMBER), rank)


def _mask_groups(r: Row, sums: Any) -> None:
    """ranks = OUTSIDE for experts of the groups that do not take part."""
    size = r.op.experts // r.op.groups
    with g.when(r.tid < T.int32(r.op.groups)):
        first, second = g.variable(float("-inf")), g.variable(float("-inf"))
        with g.serial(size) as member:
            pick = g.let(_pick_or_least(r, r.tid * T.int32(size) + member))
            lower = g.let(T.Select(pick < first[0], pick, first[0]))
            g.put(second, T.Select(lower > second[0], lower, second[0]))
            g.put(first, T.Select(pick > first[0], pick, first[0]))
        g.store(sums, first[0] + second[0] if size > 1 else first[0], r.tid)
    g.barrier()
    for i in range(r.held):
        with g.when(r.expert(i) < T.int32(r.op.experts)):
            group = g.let(r.expert(i) // T.int32(size))
            before = _count(r.op.groups, _earlier_group(sums, group))
            with g.when(before[0] >= T.int32(r.op.keep)):
                g.put(r.ranks, T.int32(OUTSIDE), i)


def _earlier_group(sums: Any, group: Any) -> Callable[[Any], Any]:
    """Whether group j comes before `group`, as a function of j."""
    own = g.let(sums[group])
    return lambda j: _precedes(sums[j], own, j < group)


def _pick_or_least(r: Row, e: Any) -> Any:
    pick = g.let(r.scores[e] + r.a.bias[e])
    is_nan = T.bitwise_and(g.bits(pick, "int32"), T.int32(0x7FFFFFFF)) > T.int32(0x7F800000)
    return T.Select(is_nan, g.floats(float("-inf")), pick)


def _precedes(key: Any, own: Any, lower: Any) -> Any:
    """Whether another key comes first: it is larger, or the same of a lower number."""
    return T.Or(key > own, T.And(key == own, lower))


def _count(extent: int, holds: Callable[[Any], Any]) -> Any:
    """A variable with the number of 0 <= j < extent for which `holds(j)`."""
    count = g.variable(0, "int32")
    together = next(k for k in (8, 4, 2, 1) if extent % k == 0)
    with g.serial(extent // together) as turn:
        first = g.let(turn * T.int32(together))
        found = (T.Select(holds(first + T.int32(k)), 1, 0) for k in range(together))
        g.put(count, sum(found, count[0]))
    return count


def _candidates(r: Row, bests: Any, winners: int, keys: Any, experts: Any) -> None:
    """keys and experts of the threads whose best expert is among the `winners` best."""
    best = g.variable(r.ranks[0])
    for i in range(1, r.held):
        g.put(best, T.max(best[0], r.ranks[i]))
    own = g.let(best[0])
    g.store(bests, own, r.tid)
    g.barrier()
    place = _count(r.threads, lambda j: _precedes(bests[j], own, j < r.tid))
    with g.when(place[0] < T.int32(winners)):
        for i in range(r.held):
            at = place[0] * T.int32(r.held) + T.int32(i)
            g.store(keys, r.ranks[i], at)
            g.store(experts, r.expert(i), at)
    g.barrier()


def _choose(r: Row, candidates: int, keys: Any, experts: Any, chosen: Any) -> None:
    """chosen = the experts that fewer than top_k precede, each at its place."""
    with g.strided(r.tid, candidates, r.threads) as c:
        own, expert = g.let(keys[c]), g.let(experts[c])
        place = _count(candidates, lambda j: _precedes(keys[j], own, experts[j] < expert))
        with g.when(place[0] < T.int32(r.op.top_k)):
            g.store(chosen, expert, place[0])
    g.barrier()


def _weigh(r: Row, chosen: Any) -> None:
    """Results: the experts; their scores, over the sum, times the scale."""
    factor = g.variable(r.op.scale)
    if r.op.renormalize:
        total = g.variable(0.0)
        with g.serial(r.op.top_k) as c:
            g.put(total, total[0] + r.scores[chosen[c]])
        g.put(factor, g.floats(r.op.scale) / (total[0] + g.floats(1e-20)))
    with g.strided(r.tid, r.op.top_k, r.threads) as c:
        g.store(r.a.experts, chosen[c], r.row, c)
        g.store(r.a.weights, r.scores[chosen[c]] * factor[0], r.row, c)
