"""Logits into token ids on a GPU: one workgroup per row, no sort.

The thresholds of top-k and top-p are found digit by digit in integers that order as the logits do:
each thread adds up weights per digit in its own column of shared memory, so there are no atomic
operations and every sum has one order. The draw narrows the row in turns: the threads share the
range, and the part in which the running sum passes its target is the next range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Sample
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule
from k3tvm.schedules.sampling import NOTHING, TEMPERATURE, TOP_P, UNIFORM

THREADS = 256
BITS = 4  # of one digit
BINS = 1 << BITS
SEGMENT = THREADS // BINS
LAST = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """A row and its workgroup. best: the largest logit; masses are relative to its own.

    columns [BINS * THREADS], partial [THREADS], totals [BINS]: shared memory.
    """

    op: Sample
    a: SimpleNamespace
    row: Any
    tid: Any
    best: Any
    temperature: Any
    columns: Any
    partial: Any
    totals: Any

    def mass(self, x: Any) -> Any:
        """Probability of a logit, relative to the largest; 0 for NaN."""
        # the largest may be infinite
        below = T.Select(x == self.best, g.floats(0.0), (x - self.best) / self.temperature)
        share = f.exp(g.let(below))
        return g.let(T.Select(key_of(x) == T.int32(NOTHING), g.floats(0.0), share))


@dataclass(frozen=True)
class Cut:
    """What top-k or top-p keeps: keys above `key`, and the first `ties` of those equal to it.

    There are `equals` of them, if known.
    """

    key: Any
    ties: Any
    equals: Any = None


def key_of(x: Any) -> Any:
    """An int32 that orders as the float32 does: NaN first of all, both zeros the same."""
    raw = g.let(g.bits(x, "int32"))
    magnitude = g.let(T.bitwise_and(raw, T.int32(0x7FFFFFFF)))
    key = T.bitwise_xor(raw, T.bitwise_and(raw >> T.int32(31), T.int32(0x7FFFFFFF)))
    key = T.Select(magnitude == T.int32(0), T.int32(0), key)
    # through memory: TVM would repeat the whole expression wherever the key is used
    return g.variable(T.Select(magnitude > T.int32(0x7F800000), T.int32(NOTHING), key))[0]


def logit_of(key: Any) -> Any:
    """The logit of a key."""
    flipped = T.bitwise_xor(key, T.bitwise_and(key >> T.int32(31), T.int32(0x7FFFFFFF)))
    return g.let(g.bits(g.let(flipped), "float32"))


@schedule(Sample, "gpu", "a workgroup per row; thresholds by a radix search, no sort")
def sample_gpu(op: Sample, p: GpuProfile, a: SimpleNamespace) -> None:
    """The largest logit; where a draw is wanted, the thresholds, then the draw."""
    if p.threads < THREADS:
        raise Refusal(f"requires workgroups of {THREADS} threads, got {p.threads}")
    with g.groups(a.m, THREADS) as (row, tid):
        columns, partial, totals = g.shared(BINS * THREADS), g.shared(THREADS), g.shared(BINS)
        keys = g.shared(THREADS, "int32")
        top, token = _largest(op, a, row, tid, keys)
        temperature = g.let(a.controls[row, TEMPERATURE])
        wanted = T.And(temperature > g.floats(0.0), top > T.int32(NOTHING))
        with T.If(wanted):
            with T.Then():
                r = Row(op, a, row, tid, logit_of(top), temperature, columns, partial, totals)
                _draw(r, _top_p(r, _top_k(r)), keys)
            with T.Else(), g.when(tid == T.int32(0)):
                g.store(a.ids, token, row)


def _largest(op: Sample, a: SimpleNamespace, row: Any, tid: Any, keys: Any) -> tuple[Any, Any]:
    """(key, id) of the largest logit, the lowest id on a tie; id 0 where all are NaN."""
    best, at = g.variable(NOTHING, "int32"), g.variable(0, "int32")
    with g.strided(tid, op.vocab, THREADS) as i:
        key = key_of(g.let(a.logits[row, i]))
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
        with g.strided(r.tid, r.op.vocab, THREADS) as i:
            x = g.let(r.a.logits[r.row, i])
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


def _search(
    r: Row, target: Any, weight: Callable[[Any, Any], Any]
) -> tuple[Any, Any, Any]:
    """(key, above, total): the key where the sum of weights over descending keys reaches `target`.

    above: the weights of larger keys; total: of the tokens that have the key.
    """
    prefix, above, total = g.variable(0, "uint32"), g.variable(0.0), g.variable(0.0)
    with g.serial(32 // BITS) as level:
        shift = g.let(g.cast(T.int32(32 - BITS) - level * T.int32(BITS), "uint32"))
        with g.serial(BINS) as b:
            g.store(r.columns, g.floats(0.0), b * T.int32(THREADS) + r.tid)
        with g.strided(r.tid, r.op.vocab, THREADS) as i:
            x = g.let(r.a.logits[r.row, i])
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


def _draw(r: Row, cut: Cut, marks: Any) -> None:
    """ids[row] = the token where the running sum over what is kept passes u of the whole."""
    start, length = g.variable(0, "int32"), g.variable(r.op.vocab, "int32")
    before, used, target = g.variable(0.0), g.variable(0, "int32"), g.variable(0.0)
    tied_mass = r.mass(logit_of(cut.key))
    spans, turns = r.op.vocab, 0
    while spans > 1:
        spans, turns = -(-spans // THREADS), turns + 1
    with g.serial(max(turns, 1)) as turn:
        span = g.let((length[0] + T.int32(THREADS - 1)) // T.int32(THREADS))
        first = g.let(start[0] + r.tid * span)
        stop = g.let(T.min(first + span, start[0] + length[0]))
        larger, equal = _masses(r, cut, first, stop)
        equals = _running(r, g.cast(equal, "float32"))
        earlier = g.let(used[0] + g.cast(equals(r.tid), "int32") - equal)
        kept = g.let(T.max(T.min(cut.ties - earlier, equal), T.int32(0)))
        mass = g.let(larger + g.cast(kept, "float32") * tied_mass)
        sums = _running(r, mass)
        whole = sums(T.int32(THREADS - 1))
        with g.when(turn == T.int32(0)):
            g.put(target, whole * r.a.controls[r.row, UNIFORM])
        own, previous = sums(r.tid), sums(T.max(r.tid - T.int32(1), T.int32(0)))
        mine = _passes(before[0], own, target[0], whole)
        theirs = T.And(
            r.tid > T.int32(0), _passes(before[0], previous, target[0], whole)
        )
        with g.when(T.And(mine, T.Not(theirs))):
            base = g.let(T.Select(r.tid > T.int32(0), previous, g.floats(0.0)))
            g.store(marks, first, 0)
            g.store(marks, stop - first, 1)
            g.store(marks, earlier, 2)
            g.store(r.partial, before[0] + base, 0)
        g.barrier()
        g.put(start, marks[T.int32(0)])
        g.put(length, marks[T.int32(1)])
        g.put(used, marks[T.int32(2)])
        g.put(before, r.partial[T.int32(0)])
        g.barrier()
    with g.when(r.tid == T.int32(0)):
        g.store(r.a.ids, start[0], r.row)


def _passes(before: Any, running: Any, target: Any, whole: Any) -> Any:
    """Whether the target is passed; at the end of the range at the latest, whatever rounding did.

    Running sums never fall, so the first thread that passes has mass of its own.
    """
    return T.Or(before + running > target, running >= whole)


def _masses(r: Row, cut: Cut, first: Any, stop: Any) -> tuple[Any, Any]:
    """Of tokens first <= i < stop: the mass above the cut, and how many are tied at it."""
    larger, equal = g.variable(0.0), g.variable(0, "int32")
    with g.serial_range(first, T.max(first, stop)) as i:
        x = g.let(r.a.logits[r.row, i])
        key = key_of(x)
        with g.when(key > cut.key):
            g.put(larger, larger[0] + r.mass(x))
        g.put(equal, equal[0] + T.Select(key == cut.key, T.int32(1), T.int32(0)))
    return g.let(larger[0]), g.let(equal[0])


def _running(r: Row, value: Any) -> Callable[[Any], Any]:
    """Running sums over the threads, inclusive: of thread t by calling the result with t.

    In segments, so that no sum is ever smaller than the one before it.
    """
    g.barrier()
    g.store(r.columns, value, r.tid)
    g.barrier()
    with g.when(r.tid < T.int32(BINS)):
        total = g.variable(0.0)
        with g.serial(SEGMENT) as j:
            at = g.let(r.tid * T.int32(SEGMENT) + j)
            g.put(total, total[0] + r.columns[at])
            g.store(r.columns, total[0], at)
    g.barrier()
    with g.when(r.tid == T.int32(0)):
        total = g.variable(0.0)
        with g.serial(BINS) as j:
            g.store(r.totals, total[0], j)
            g.put(total, total[0] + r.columns[j * T.int32(SEGMENT) + T.int32(SEGMENT - 1)])
    g.barrier()
    return lambda t: g.let(r.totals[t // T.int32(SEGMENT)] + r.columns[t])
