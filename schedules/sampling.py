"""Logits into token ids: greedy, or top-k, top-p and a draw from what they keep."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Sample
from k3tvm.schedules import functions as f
from k3tvm.schedules import vector as v
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule

TEMPERATURE, TOP_P, UNIFORM = 0, 1, 2  # columns of `controls`
NOTHING = -(2**31)  # the key of NaN, below that of minus infinity
LEVELS, RADIX_BITS = 4, 8  # digits of a key, the highest first


@reference(Sample)
def sample_reference(op: Sample, args: Any) -> dict[str, np.ndarray]:
    """A sort per row, float64."""
    rows = zip(args.logits, args.controls, args.top_k, strict=True)
    return {"ids": np.array([_sampled(*row) for row in rows], np.int32)}


def _sampled(logits: np.ndarray, controls: np.ndarray, top_k: int) -> int:
    if not controls[TEMPERATURE] > 0 or np.isnan(logits).all():
        return int(np.argmax(np.where(np.isnan(logits), -np.inf, logits))) if (
            np.isfinite(logits).any() or np.isposinf(logits).any()
        ) else int(np.argmin(np.isnan(logits)))
    kept = kept_mass(logits, float(controls[TEMPERATURE]), float(controls[TOP_P]), int(top_k))
    passed = np.cumsum(kept) > float(controls[UNIFORM]) * kept.sum()
    return int(np.argmax(passed)) if passed.any() else int(np.flatnonzero(kept)[-1])


def kept_mass(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """float64 [vocab]: what a draw is made from, relative to the largest; 0 for what is dropped."""
    x = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    with np.errstate(invalid="ignore", over="ignore"):  # equal infinities are replaced
        p = np.exp(np.where(x == x.max(), 0.0, (x - x.max()) / temperature))
    p[np.isnan(logits)] = 0.0
    order = np.lexsort((np.arange(len(x)), np.isnan(logits), -x))
    if top_k > 0:
        p[order[top_k:]] = 0.0
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p * p.sum()]] = 0.0
    return p


@dataclass(frozen=True)
class Row:
    """A row on the CPU: the buffers, its number, its largest logit, its temperature."""

    op: Sample
    p: CpuProfile
    a: SimpleNamespace
    row: Any
    best: Any
    temperature: Any

    def key(self, i: Any) -> Any:
        """Logit i as an int32 of the same order."""
        return key_of(v.let(self.a.logits[self.row, i]))

    def mass(self, i: Any) -> Any:
        """float64: its probability relative to the largest; 0 for NaN."""
        x = v.let(self.a.logits[self.row, i])
        below = v.let(T.Select(x == self.best, T.float32(0.0), (x - self.best) / self.temperature))
        share = v.let(f.exp(self.p, below, 1))
        share = T.Select(key_of(x) == T.int32(NOTHING), T.float32(0.0), share)
        return v.cast(share, "float64", 1)


def key_of(x: Any) -> Any:
    """An int32 that orders as the float32 does: NaN first of all, both zeros the same."""
    raw = v.let(v.bits(x, "int32", 1))
    magnitude = v.let(T.bitwise_and(raw, T.int32(0x7FFFFFFF)))
    sign = raw >> T.int32(31)
    key = T.bitwise_xor(raw, T.bitwise_and(sign, T.int32(0x7FFFFFFF)))
    key = T.Select(magnitude == T.int32(0), T.int32(0), key)
    return v.let(T.Select(magnitude > T.int32(0x7F800000), T.int32(NOTHING), key))


@schedule(Sample, "cpu", "rows in parallel; thresholds by a radix search, no sort")
def sample_cpu(op: Sample, p: CpuProfile, a: SimpleNamespace) -> None:
    """The largest logit; where a draw is wanted, the two thresholds, then the running sum."""
    with v.parallel(a.m) as row:
        best = v.scratch(1, "int32")
        v.store(a.ids, T.int32(0), row, lanes=1)
        v.store(best, T.int32(NOTHING), 0, lanes=1)
        with v.serial(op.vocab) as i:
            key = key_of(v.let(a.logits[row, i]))
            with T.If(key > best[v.int64(0)]), T.Then():
                v.store(best, key, 0, lanes=1)
                v.store(a.ids, v.cast(i, "int32", 1), row, lanes=1)
        temperature = v.let(a.controls[row, v.int64(TEMPERATURE)])
        drawn = T.And(temperature > T.float32(0.0), best[v.int64(0)] > T.int32(NOTHING))
        with T.If(drawn), T.Then():
            largest = v.let(a.logits[row, v.cast(a.ids[row], "int64", 1)])
            _draw(Row(op, p, a, row, largest, temperature))


def _draw(r: Row) -> None:
    """ids[row] = a token drawn from what top-k and top-p keep."""
    zero, one = v.int64(0), T.float64(1.0)
    nucleus = v.let(v.cast(r.a.controls[r.row, v.int64(TOP_P)], "float64", 1))
    uniform = v.let(v.cast(r.a.controls[r.row, v.int64(UNIFORM)], "float64", 1))
    asked = v.let(r.a.top_k[r.row])
    k = v.let(T.Select(asked > T.int32(0), asked, T.int32(r.op.vocab)))
    first = _search(r, v.cast(k, "float64", 1), lambda i: one)
    cut, ties = v.scratch(1, "int32"), v.scratch(1, "float64")
    v.store(cut, first.key, 0, lanes=1)
    v.store(ties, v.cast(k, "float64", 1) - first.above, 0, lanes=1)

    def kept(i: Any, left: Any) -> Any:
        """The mass of token i as far as the cut keeps it; `left` ties are not yet used."""
        key = r.key(i)
        tied = v.let(T.And(key == cut[zero], left[zero] > T.float64(0.0)))
        with T.If(tied), T.Then():
            v.store(left, left[zero] - one, 0, lanes=1)
        return v.let(T.Select(T.Or(key > cut[zero], tied), r.mass(i), T.float64(0.0)))

    def total() -> Any:
        left, sums = v.scratch(1, "float64"), v.scratch(1, "float64")
        v.store(left, ties[zero], 0, lanes=1)
        v.store(sums, T.float64(0.0), 0, lanes=1)
        with v.serial(r.op.vocab) as i:
            v.store(sums, sums[zero] + kept(i, left), 0, lanes=1)
        return sums[zero]

    with T.If(nucleus < one), T.Then():
        left = v.scratch(1, "float64")
        target = v.let(nucleus * total())
        v.store(left, ties[zero], 0, lanes=1)
        second = _search(r, target, lambda i: kept(i, left), lambda: _refill(left, ties))
        count = v.let(T.ceil((target - second.above) / second.mass))
        lowest = v.let(T.Select(second.key == cut[zero], ties[zero], T.float64(r.op.vocab)))
        v.store(ties, T.max(T.min(count, lowest), one), 0, lanes=1)
        v.store(cut, second.key, 0, lanes=1)
    target = v.let(uniform * total())
    left, running = v.scratch(1, "float64"), v.scratch(1, "float64")
    v.store(left, ties[zero], 0, lanes=1)
    v.store(running, T.float64(0.0), 0, lanes=1)
    with v.serial(r.op.vocab) as i:
        mass = kept(i, left)
        # the last one with any mass stays, should rounding keep the sum from passing the target
        with T.If(T.And(mass > T.float64(0.0), running[zero] <= target)), T.Then():
            v.store(r.a.ids, v.cast(i, "int32", 1), r.row, lanes=1)
        v.store(running, running[zero] + mass, 0, lanes=1)


def _refill(left: Any, ties: Any) -> None:
    v.store(left, ties[v.int64(0)], 0, lanes=1)


@dataclass(frozen=True)
class Found:
    """The key where a running sum over descending keys reaches its target.

    above: the sum over larger keys; mass: of one token that has the key, relative to the largest.
    """

    key: Any
    above: Any
    mass: Any


def _search(r: Row, target: Any, weight: Any, restart: Any = lambda: None) -> Found:
    """Digit by digit: weights of the tokens that share the digits so far, per next digit."""
    zero, bins = v.int64(0), 1 << RADIX_BITS
    sums = v.scratch(bins, "float64")
    prefix, above, digit = v.scratch(1, "uint32"), v.scratch(1, "float64"), v.scratch(1, "int32")
    mass, before, done = v.scratch(1, "float64"), v.scratch(1, "float64"), v.scratch(1, "int32")
    v.store(prefix, T.uint32(0), 0, lanes=1)
    v.store(above, T.float64(0.0), 0, lanes=1)
    v.store(mass, T.float64(1.0), 0, lanes=1)

    def code_of(key: Any) -> Any:
        return T.bitwise_xor(v.bits(key, "uint32", 1), T.uint32(0x80000000))

    for level in reversed(range(LEVELS)):
        shift = T.uint32(RADIX_BITS * level)
        with v.serial(bins) as b:
            v.store(sums, T.float64(0.0), b, lanes=1)
        restart()
        with v.serial(r.op.vocab) as i:
            code = v.let(code_of(r.key(i)) >> shift)
            share = v.let(weight(i))
            mine = v.bits(code >> T.uint32(RADIX_BITS), "int32", 1)
            with T.If(mine == v.bits(prefix[zero], "int32", 1)), T.Then():
                at = v.let(v.cast(T.bitwise_and(code, T.uint32(bins - 1)), "int64", 1))
                v.store(sums, sums[at] + share, at, lanes=1)
                if level == 0:
                    pass
        v.store(done, T.int32(0), 0, lanes=1)
        v.store(before, above[zero], 0, lanes=1)
        with v.serial(bins) as b:
            at = v.let(bins - 1 - b)
            open_bin = T.And(done[zero] == T.int32(0), sums[at] > T.float64(0.0))
            with T.If(open_bin), T.Then():
                v.store(digit, v.cast(at, "int32", 1), 0, lanes=1)
                v.store(above, before[zero], 0, lanes=1)
                v.store(before, before[zero] + sums[at], 0, lanes=1)
                with T.If(before[zero] >= target), T.Then():
                    v.store(done, T.int32(1), 0, lanes=1)
        low = v.cast(digit[zero], "uint32", 1)
        v.store(prefix, (prefix[zero] << T.uint32(RADIX_BITS)) + low, 0, lanes=1)
    key = v.opaque(v.bits(T.bitwise_xor(prefix[zero], T.uint32(0x80000000)), "int32", 1))
    with v.serial(r.op.vocab) as i, T.If(r.key(i) == key), T.Then():
        v.store(mass, r.mass(i), 0, lanes=1)
    return Found(key, v.opaque(above[zero]), v.opaque(mass[zero]))
