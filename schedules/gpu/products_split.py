"""Rows of x become 16-bit parts in device memory, in the order in which tensor cores take them.

A row of k values is split once, before the product, so that the workgroups of the product only copy
it. Three bfloat16 parts of a float32 value are exact, and multiply bfloat16 weights. MXFP4 weights
are exact in float16, whose 11 bits make two parts enough: each row is scaled by a power of two that
brings its largest value just under 2^15, and the sum of the parts is off by at most 2^-23 of the
value, a unit of its last place, or 2^-39 of the largest of the row.

A prepared row is [step of 32 k][part][4 lanes][8 values], then, with float16, four words of which
the first is what undoes the scale. Lane t of a warp multiplies the same 8 values of a step as it
decodes of a weight row: of MXFP4 the word 8 t ... 8 t + 7, of bfloat16 t, t + 4, ... t + 28.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Activation, WeightFormat
from k3tvm.schedules.gpu import grid as g

Expr = Any
Read = Callable[[Expr, Expr, Expr, int], Expr]  # (row, group, first k, lanes) -> values of x

STEP = 32  # elements of k in a step
RUN = 8  # of them, one lane's
LANES = STEP // RUN
RUN_WORDS, STEP_WORDS = RUN // 2, STEP // 2
TAIL = 4  # words after the steps of a scaled row
TOP = 14  # exponent of the largest value of a scaled row, of MXFP4 codes as float16 its opposite
THREADS = 128
# Order of a run of MXFP4 codes: those that two shifts and two masks decode as a pair are neighbours
PAIRED = (0, 2, 1, 3, 4, 6, 5, 7)

PARTS: dict[WeightFormat, dict[Activation, int]] = {
    "mxfp4": {"float32": 2, "float16": 1, "bfloat16": 1},
    "bfloat16": {"float32": 3, "float16": 2, "bfloat16": 1},
}


@dataclass(frozen=True)
class Split:
    """The form of prepared rows of k values.

    scaled: parts are float16 under a scale of the row, else bfloat16. consecutive: a lane's run is
    of consecutive k, which is a multiple of 8.
    """

    k: int
    parts: int
    scaled: bool
    consecutive: bool

    @property
    def steps(self) -> int:
        """Steps of k; past its end values are zero."""
        return -(-self.k // STEP)

    @property
    def words(self) -> int:
        """32-bit words of a row, a multiple of four."""
        return self.steps * self.parts * STEP_WORDS + (TAIL if self.scaled else 0)

    @property
    def scale_word(self) -> int:
        """Where a scaled row has its scale."""
        return self.words - TAIL


def form_of(fmt: WeightFormat, k: int, act: Activation, exact: bool = False) -> Split:
    """Rows for weights of a format; `exact` for products that stay float32 whatever `act` is."""
    mxfp4 = fmt == "mxfp4"
    return Split(k, PARTS[fmt]["float32" if exact else act], scaled=mxfp4, consecutive=mxfp4)


def split(form: Split, rows: Expr, groups: int, read: Read) -> Any:
    """Emit the launch that prepares `rows` x `groups` rows; returns them [rows, groups, words].

    read(row, group, k, lanes): `lanes` values of x from element k on; lanes is 4 only where k is a
    multiple of 4.
    """
    out = g.workspace((rows, groups, form.words), "uint32")
    with g.groups(rows * T.int32(groups), THREADS) as (task, tid):
        sizes = g.shared(THREADS, "int32") if form.scaled else None
        row, group = g.let(task // T.int32(groups)), g.let(task % T.int32(groups))

        def values(run: Expr) -> list[Expr]:
            found = _run(form, run, lambda k, lanes: read(row, group, k, lanes))
            # changes nothing where values are bfloat16 already, as one part supposes
            near = form.parts == 1 and not form.scaled
            return [g.let(g.round_bf16(value)) for value in found] if near else found

        factor = None
        if form.scaled:
            top = _largest(form, tid, sizes, values)
            factor = g.let(_power(T.int32(254 + TOP) - top))
            with g.when(tid == T.int32(0)):
                # 2^-TOP of the values of MXFP4 is what their codes are decoded to
                g.store(out, g.bits(_power(top), "uint32"), row, group, form.scale_word)
        with g.strided(tid, form.steps * LANES, THREADS) as run:
            step, lane = g.let(run // T.int32(LANES)), g.let(run % T.int32(LANES))
            for part, words in enumerate(parts_of(form, values(run), factor)):
                place = (step * T.int32(form.parts) + T.int32(part)) * T.int32(STEP_WORDS)
                at = place + lane * T.int32(RUN_WORDS)
                for i, word in enumerate(words):
                    g.store(out, word, row, group, at + T.int32(i))
    return out


def _run(form: Split, run: Expr, read: Callable[[Expr, int], Expr]) -> list[Expr]:
    """The 8 values of a run in order, zero past the end of k."""
    step, lane = g.let(run // T.int32(LANES)), g.let(run % T.int32(LANES))
    if form.consecutive:
        first = step * T.int32(STEP) + lane * T.int32(RUN)
        fours = [T.Bind(read(first + T.int32(4 * i), 4)) for i in range(2)]
        return [g.let(g.lane(fours[i // 4], i % 4)) for i in PAIRED]
    places = [step * T.int32(STEP) + T.int32(LANES * j) + lane for j in range(RUN)]
    if form.k % STEP == 0:
        return [g.let(read(k, 1)) for k in places]
    cells = [g.variable(0.0) for _ in places]
    for k, cell in zip(places, cells, strict=True):
        with g.when(k < T.int32(form.k)):
            g.put(cell, read(k, 1))
    return [cell[0] for cell in cells]


def _largest(form: Split, tid: Expr, sizes: Any, values: Callable[[Expr], list[Expr]]) -> Expr:
    """The exponent of the row's largest value as float32 has it, so that its powers are finite."""
    most = g.variable(0, "int32")
    with g.strided(tid, form.steps * LANES, THREADS) as run:
        for value in values(run):
            size = g.cast(T.bitwise_and(g.bits(value, "uint32"), T.uint32(0x7FFFFFFF)), "int32")
            g.put(most, T.max(most[0], size))
    g.store(sizes, most[0], tid)
    top = g.max_of(sizes, tid, THREADS) >> T.int32(23)
    return g.let(T.max(T.min(top, T.int32(254)), T.int32(TOP)))


def _power(exponent: Expr) -> Expr:
    """The float32 power of two with this biased exponent."""
    return g.bits(exponent << T.int32(23), "float32")


def parts_of(form: Split, values: list[Expr], factor: Expr | None = None) -> list[list[Expr]]:
    """Words of two values each, one list for every part, the largest part first."""
    if factor is not None:
        values = [g.let(value * factor) for value in values]
    parts = []
    for part in range(form.parts):
        heads = [_half(v) if form.scaled else g.let(g.bits(v, "uint32")) for v in values]
        parts.append([_pair(form, heads[i], heads[i + 1]) for i in range(0, RUN, 2)])
        if part < form.parts - 1:
            values = [g.let(v - _number(form, h)) for v, h in zip(values, heads, strict=True)]
    return parts


def _half(value: Expr) -> Expr:
    return g.let(g.cast(g.bits(g.cast(value, "float16"), "uint16"), "uint32"))


def _number(form: Split, head: Expr) -> Expr:
    """What a part stands for: float16 bits, or float32 bits of which the upper half is taken."""
    if form.scaled:
        return g.cast(g.bits(g.cast(head, "uint16"), "float16"), "float32")
    return g.bits(T.bitwise_and(head, T.uint32(0xFFFF0000)), "float32")


def _pair(form: Split, low: Expr, high: Expr) -> Expr:
    if form.scaled:
        return T.bitwise_or(low, high << T.uint32(16))
    return T.bitwise_or(low >> T.uint32(16), T.bitwise_and(high, T.uint32(0xFFFF0000)))
