"""Logits into token ids: greedy, or top-k, top-p and a draw from what they keep."""

from __future__ import annotations

from collections.abc import Callable
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
# The key of NaN, below that of minus infinity; TVM holds that no int32 equals the least one.
NOTHING = -(2**31) + 2**20
LEVELS, RADIX_BITS = 4, 8  # digits of a key, the highest first


@reference(Sample)
def sample_reference(op: Sample, args: Any) -> dict[str, np.ndarray]:
    """A sort per row, float64."""
    rows = zip(args.logits, args.controls, args.top_k, strict=True)
    return {"ids": np.array([_sampled(*row) for row in rows], np.int32)}


def _sampled(logits: np.ndarray, controls: np.ndarray, top_k: int) -> int:
    numbers = np.flatnonzero(~np.isnan(logits))
    if not numbers.size:
        return 0
    if not controls[TEMPERATURE] > 0:
        return int(numbers[np.argmax(logits[numbers])])
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
    """The largest logit; where a draw is wanted, masses, what is kept of them, a running sum."""
    zero = v.int64(0)
    with v.parallel(a.m) as row:
        best, masses = v.scratch(1, "int32"), v.workspace((op.vocab,))
        v.store(a.ids, T.int32(0), row, lanes=1)
        v.store(best, T.int32(NOTHING), 0, lanes=1)
        with v.serial(op.vocab) as i:
            key = key_of(v.let(a.logits[row, i]))
            with T.If(key > best[zero]), T.Then():
                v.store(best, key, 0, lanes=1)
                v.store(a.ids, v.cast(i, "int32", 1), row, lanes=1)
        drawn = a.controls[row, v.int64(TEMPERATURE)] > T.float32(0.0)
        with T.If(T.And(drawn, best[zero] > T.int32(NOTHING))), T.Then():
            _fill_masses(op, p, a, row, masses)
            k = T.Select(a.top_k[row] > T.int32(0), a.top_k[row], T.int32(op.vocab))
            ones = v.cast(v.let(k), "float64", 1)
            _keep(op, a, row, masses, v.opaque(ones), lambda i: T.float64(1.0))
            top_p = v.cast(a.controls[row, v.int64(TOP_P)], "float64", 1)
            target = v.opaque(top_p * _total(op, masses))
            _keep(op, a, row, masses, target, lambda i: v.cast(masses[i], "float64", 1))
            _draw(op, a, row, masses)


def _fill_masses(op: Sample, p: CpuProfile, a: SimpleNamespace, row: Any, masses: Any) -> None:
    """Probabilities relative to the largest; 0 for NaN."""
    best = v.let(a.logits[row, v.cast(a.ids[row], "int64", 1)])
    temperature = v.let(a.controls[row, v.int64(TEMPERATURE)])
    with v.serial(op.vocab) as i:
        x = v.let(a.logits[row, i])
        # the largest may be infinite
        below = v.let(T.Select(x == best, T.float32(0.0), (x - best) / temperature))
        share = v.let(f.exp(p, below, 1))
        number = key_of(x) != T.int32(NOTHING)
        v.store(masses, T.Select(number, share, T.float32(0.0)), i, lanes=1)


def _total(op: Sample, masses: Any) -> Any:
    total = v.scratch(1, "float64")
    v.store(total, T.float64(0.0), 0, lanes=1)
    with v.serial(op.vocab) as i:
        v.store(total, total[v.int64(0)] + v.cast(masses[i], "float64", 1), 0, lanes=1)
    return v.opaque(total[v.int64(0)])


def _keep(
    op: Sample,
    a: SimpleNamespace,
    row: Any,
    masses: Any,
    target: Any,
    weight: Callable[[Any], Any],
) -> None:
    """Drop tokens that `target` weights of more likely ones precede; lower ids first on a tie."""
    zero = v.int64(0)
    cut, above = _search(op, a, row, target, weight)
    with v.serial(op.vocab) as i:
        key = key_of(v.let(a.logits[row, i]))
        late = T.And(key == cut, above[zero] >= target)
        with T.If(T.Or(key < cut, late)):
            with T.Then():
                v.store(masses, T.float32(0.0), i, lanes=1)
            with T.Else(), T.If(key == cut), T.Then():
                v.store(above, above[zero] + weight(i), 0, lanes=1)


def _search(
    op: Sample, a: SimpleNamespace, row: Any, target: Any, weight: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """(key, above): the key where the sum of weights over descending keys reaches the target.

    `above` is a variable with the weights of larger keys. Digit by digit: the weights of the
    tokens that share the digits so far, per next digit.
    """
    zero, bins = v.int64(0), 1 << RADIX_BITS
    sums = v.scratch(bins, "float64")
    prefix, digit = v.scratch(1, "uint32"), v.scratch(1, "uint32")
    above = v.scratch(1, "float64")
    v.store(prefix, T.uint32(0), 0, lanes=1)
    v.store(above, T.float64(0.0), 0, lanes=1)
    with v.serial(LEVELS) as level:
        shift = v.let(v.cast(v.int64(LEVELS - 1) - level, "uint32", 1) * T.uint32(RADIX_BITS))
        with v.serial(bins) as b:
            v.store(sums, T.float64(0.0), b, lanes=1)
        with v.serial(op.vocab) as i:
            code = v.let(_code(key_of(v.let(a.logits[row, i]))) >> shift)
            same = v.bits((code >> T.uint32(RADIX_BITS)) - prefix[zero], "int32", 1)
            with T.If(same == T.int32(0)), T.Then():
                at = v.let(v.cast(T.bitwise_and(code, T.uint32(bins - 1)), "int64", 1))
                v.store(sums, sums[at] + weight(i), at, lanes=1)
        _choose_digit(sums, bins, target, digit, above)
        v.store(prefix, (prefix[zero] << T.uint32(RADIX_BITS)) + digit[zero], 0, lanes=1)
    return v.opaque(v.bits(_code(prefix[zero]), "int32", 1)), above


def _code(key: Any) -> Any:
    """A key as uint32 of the same order, or back."""
    return T.bitwise_xor(T.reinterpret("uint32", key), T.uint32(0x80000000))


def _choose_digit(sums: Any, bins: int, target: Any, digit: Any, above: Any) -> None:
    """The highest digit with which the sum reaches the target, else the last that has weight."""
    zero = v.int64(0)
    running, done = v.scratch(1, "float64"), v.scratch(1, "int32")
    v.store(running, above[zero], 0, lanes=1)
    v.store(done, T.int32(0), 0, lanes=1)
    with v.serial(bins) as b:
        at = v.let(bins - 1 - b)
        wanted = T.And(done[zero] == T.int32(0), sums[at] > T.float64(0.0))
        with T.If(wanted), T.Then():
            v.store(digit, v.cast(at, "uint32", 1), 0, lanes=1)
            v.store(above, running[zero], 0, lanes=1)
            v.store(running, running[zero] + sums[at], 0, lanes=1)
            with T.If(running[zero] >= target), T.Then():
                v.store(done, T.int32(1), 0, lanes=1)


def _draw(op: Sample, a: SimpleNamespace, row: Any, masses: Any) -> None:
    """ids[row] = the first token with which the running sum passes u of the whole."""
    zero, running = v.int64(0), v.scratch(1, "float64")
    uniform = v.cast(a.controls[row, v.int64(UNIFORM)], "float64", 1)
    target = v.opaque(uniform * _total(op, masses))
    v.store(running, T.float64(0.0), 0, lanes=1)
    with v.serial(op.vocab) as i:
        here = T.And(masses[i] > T.float32(0.0), running[zero] <= target)
        with T.If(here), T.Then():
            v.store(a.ids, v.cast(i, "int32", 1), row, lanes=1)
        v.store(running, running[zero] + v.cast(masses[i], "float64", 1), 0, lanes=1)
