"""Router logits into the chosen experts and their weights, and the choices grouped by expert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ExpertSort, Router
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.numerics import sigmoid
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import Refusal, reference, schedule

# Picks are ranked as integers, so that NaN has a place too: that of -infinity. No number has the
# other two ranks.
TAKEN, OUTSIDE, NOT_A_NUMBER = -(2**31), -(2**31) + 1, 0x807FFFFF - 2**32


@reference(Router)
def router_reference(op: Router, args: Any) -> dict[str, np.ndarray]:
    """Sort by (pick, lower expert) per row; groups first. NaN ranks below every number."""
    rows = len(args.x)
    scores = sigmoid(args.x[:, : op.experts].astype(np.float64))
    # The choice itself is defined on float32 picks: ties there are ties.
    picks = scores.astype(np.float32) + args.bias
    picks = np.where(np.isnan(picks), -np.inf, picks)
    if op.groups > op.keep:
        grouped = picks.reshape(rows, op.groups, -1)
        best = np.sort(grouped, axis=-1)[:, :, -2:].sum(axis=-1)
        kept = np.argsort(-best, axis=-1, kind="stable")[:, : op.keep]
        outside = np.ones((rows, op.groups), bool)
        outside[np.arange(rows)[:, None], kept] = False
    else:
        outside = np.zeros((rows, op.groups), bool)
    outside = np.repeat(outside, op.experts // op.groups, axis=1)
    order = [np.lexsort((-picks[r], outside[r]))[: op.top_k] for r in range(rows)]
    experts = np.array(order, np.int32).reshape(rows, op.top_k)
    weights = np.take_along_axis(scores, experts, axis=1)
    if op.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return {"experts": experts, "weights": weights * op.scale}


@schedule(Router, "cpu", "rows in parallel; top-k by repeated 16-lane maximum of integer ranks")
def router_cpu(op: Router, p: CpuProfile, a: SimpleNamespace) -> None:
    """Scores and ranks of a row into scratch, groups masked, then one expert at a time."""
    if op.top_k > op.experts:
        raise Refusal(f"requires top_k <= experts, got {op.top_k} > {op.experts}")
    if op.experts % op.groups:
        raise Refusal(f"requires experts in equal groups, got {op.experts} in {op.groups}")
    padded = -(-op.experts // v.LANES) * v.LANES
    with v.parallel(a.n) as row:
        scores, ranks = v.scratch(padded), v.scratch(padded, "int32")
        _rank(op, p, a, row, scores, ranks)
        if op.groups > op.keep:
            _mask_groups(op, scores, a.bias, ranks)
        _choose(op, a, row, ranks)
        _weigh(op, a, row, scores)


def _rank(op: Router, p: CpuProfile, a: SimpleNamespace, row: Any, scores: Any, ranks: Any) -> None:
    """scores[e] = sigmoid(logit); ranks[e] orders the biased scores as integers."""

    def piece(at: Any, lanes: int) -> None:
        score = v.let(f.sigmoid(p, v.load(a.x, row, at, lanes=lanes), lanes))
        v.store(scores, score, at, lanes=lanes)
        pick = v.let(score + v.load(a.bias, at, lanes=lanes))
        v.store(ranks, _rank_of(pick, lanes), at, lanes=lanes)

    whole = op.experts // v.LANES
    with v.serial(whole) as i:
        piece(i * v.LANES, v.LANES)
    rest = v.chunks(op.experts - whole * v.LANES)
    if rest:
        v.store(ranks, v.splat(TAKEN, dtype="int32"), whole * v.LANES)
    for at, lanes in rest:
        piece(whole * v.LANES + at, lanes)


def _rank_of(pick: Any, lanes: int) -> Any:
    """An int32 that orders as the float does; negative floats have their magnitude bits flipped."""
    raw = v.let(v.bits(pick, "int32", lanes))
    sign = raw >> v.splat(31, lanes, "int32")
    magnitude = v.let(T.bitwise_and(raw, v.splat(0x7FFFFFFF, lanes, "int32")))
    rank = T.bitwise_xor(raw, T.bitwise_and(sign, v.splat(0x7FFFFFFF, lanes, "int32")))
    is_nan = magnitude > v.splat(0x7F800000, lanes, "int32")
    return T.Select(is_nan, v.splat(NOT_A_NUMBER, lanes, "int32"), rank)


def _mask_groups(op: Router, scores: Any, bias: Any, ranks: Any) -> None:
    """ranks = OUTSIDE for experts of the groups that do not take part."""
    size = op.experts // op.groups
    sums, out = v.scratch(op.groups), v.scratch(op.groups, "int32")
    least, zero = T.float32(float("-inf")), v.int64(0)
    with v.serial(op.groups) as g:
        first, second = v.scratch(1), v.scratch(1)
        v.store(first, least, 0, lanes=1)
        v.store(second, least, 0, lanes=1)
        with v.serial_range(g * size, (g + 1) * size) as e:
            number = ranks[e] != T.int32(NOT_A_NUMBER)
            pick = v.let(T.Select(number, scores[e] + bias[e], least))
            lower = v.let(T.Select(pick < first[zero], pick, first[zero]))
            v.store(second, T.Select(lower > second[zero], lower, second[zero]), 0, lanes=1)
            v.store(first, T.Select(pick > first[zero], pick, first[zero]), 0, lanes=1)
        v.store(sums, first[zero] + second[zero] if size > 1 else first[zero], g, lanes=1)
        v.store(out, T.int32(1), g, lanes=1)
    best = v.scratch(1, "int64")
    with v.serial(op.keep):
        v.store(best, T.int64(-1), 0, lanes=1)
        with v.serial(op.groups) as g, T.If(out[g] == T.int32(1)), T.Then():
            known = v.let(T.max(best[zero], T.int64(0)))
            with T.If(T.Or(best[zero] < T.int64(0), sums[g] > sums[known])), T.Then():
                v.store(best, g, 0, lanes=1)
        v.store(out, T.int32(0), best[zero], lanes=1)
    with v.serial(op.experts) as e, T.If(out[e // size] == T.int32(1)), T.Then():
        v.store(ranks, T.int32(OUTSIDE), e, lanes=1)


def _choose(op: Router, a: SimpleNamespace, row: Any, ranks: Any) -> None:
    """experts[row] = the largest ranks in descending order, the lower expert on a tie."""
    lane = v.lane_numbers()
    best, at = v.scratch(v.LANES, "int32"), v.scratch(v.LANES, "int32")
    winner = v.scratch(1, "int32")
    zero = v.int64(0)
    with v.serial(op.top_k) as c:
        v.store(best, v.splat(TAKEN, dtype="int32"), 0)
        v.store(at, lane, 0)
        with v.serial(-(-op.experts // v.LANES)) as i:
            rank = v.let(v.load(ranks, i * v.LANES))
            number = lane + v.splat(v.cast(i * v.LANES, "int32", 1))
            better = rank > v.load(best, 0)
            v.store(at, T.Select(better, number, v.load(at, 0)), 0)
            v.store(best, T.Select(better, rank, v.load(best, 0)), 0)
        top = v.let(v.reduce_int("smax", v.let(v.load(best, 0))))
        none = v.splat(2**31 - 1, dtype="int32")
        tied = T.Select(v.load(best, 0) == v.splat(top), v.load(at, 0), none)
        v.store(winner, v.reduce_int("smin", v.let(tied)), 0, lanes=1)
        v.store(a.experts, winner[zero], row, c, lanes=1)
        v.store(ranks, T.int32(TAKEN), v.cast(winner[zero], "int64", 1), lanes=1)


def _weigh(op: Router, a: SimpleNamespace, row: Any, scores: Any) -> None:
    """weights[row] = scores of the chosen, over their sum, times the scale."""

    def score(c: Any) -> Any:
        return scores[v.cast(a.experts[row, c], "int64", 1)]

    factor = v.scratch(1)
    zero = v.int64(0)
    v.store(factor, T.float32(op.scale), 0, lanes=1)
    if op.renormalize:
        total = v.scratch(1)
        v.store(total, T.float32(0.0), 0, lanes=1)
        with v.serial(op.top_k) as c:
            v.store(total, total[zero] + score(c), 0, lanes=1)
        v.store(factor, T.float32(op.scale) / (total[zero] + T.float32(1e-20)), 0, lanes=1)
    with v.serial(op.top_k) as c:
        v.store(a.weights, score(c) * factor[zero], row, c, lanes=1)


@reference(ExpertSort)
def expert_sort_reference(op: ExpertSort, args: Any) -> dict[str, np.ndarray]:
    """A stable sort of the flattened choices."""
    flat = args.chosen.reshape(-1)
    first = np.searchsorted(np.sort(flat), np.arange(op.experts + 1)).astype(np.int32)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    return {"first": first, "order": order.reshape(args.chosen.shape)}


@schedule(ExpertSort, "cpu", "one thread: three passes that are short next to the experts' work")
def expert_sort_cpu(op: ExpertSort, p: CpuProfile, a: SimpleNamespace) -> None:
    """Counts, their running sum, then every pair to the next place of its expert."""
    place = v.scratch(op.experts, "int32")
    one = T.int32(1)
    total = v.scratch(1, "int32")
    zero = v.int64(0)

    def expert(row: Any, c: Any) -> Any:
        return v.cast(a.chosen[row, c], "int64", 1)

    with v.serial(op.experts) as e:
        v.store(place, T.int32(0), e, lanes=1)
    with v.serial(a.n) as row, v.serial(op.top_k) as c:
        e = v.let(expert(row, c))
        v.store(place, place[e] + one, e, lanes=1)
    v.store(total, T.int32(0), 0, lanes=1)
    with v.serial(op.experts) as e:
        v.store(a.first, total[zero], e, lanes=1)
        v.store(total, total[zero] + place[e], 0, lanes=1)
        v.store(place, a.first[e], e, lanes=1)
    v.store(a.first, total[zero], op.experts, lanes=1)
    with v.serial(a.n) as row, v.serial(op.top_k) as c:
        e = v.let(expert(row, c))
        at = v.let(v.cast(place[e], "int64", 1))
        v.store(place, place[e] + one, e, lanes=1)
        pair = v.cast(row * op.top_k + c, "int32", 1)
        v.store(a.order, pair, at // op.top_k, at % op.top_k, lanes=1)
