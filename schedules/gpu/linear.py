"""Linear layers on a GPU: a workgroup per block of 16 rows for few rows of x, tiles for many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import Linear
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK, Weights, weights_of
from k3tvm.schedules.gpu.products_few import Team, matvec, threads_of
from k3tvm.schedules.gpu.products_few_cores import few_on_cores
from k3tvm.schedules.gpu.products_few_strip import FewOnCores, Strip
from k3tvm.schedules.gpu.products_many import fits, matmul
from k3tvm.schedules.gpu.products_matrix import is_exact, product_of
from k3tvm.schedules.gpu.products_mma import product
from k3tvm.schedules.gpu.products_mma_plan import Plan, Shape, able
from k3tvm.schedules.gpu.products_split import PARTS, form_of, split
from k3tvm.schedules.gpu.products_tile import THREADS, Product, Tile
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule

Expr = Any
Emit = Callable[[], None]

FEW = 16  # up to this many rows there is no need for tiles
CHUNK = 4  # rows that share one reading of the weights there
LOW, HIGH = (32, 32), (64, 64)  # rows of x and of the weight in a tile
BUSY = 256  # workgroups that keep a large device busy; the large tiles wait for as many
# The same on tensor cores; there the large tiles wait for a workgroup per multiprocessor
CORES_LOW, CORES_BUSY = Shape(64, 32, 1, 4, resident=4), 128
CORES_HIGH = {  # by parts
    1: Shape(128, 128, 2, 4, resident=1),
    2: Shape(128, 64, 2, 2, resident=0),
    3: Shape(128, 64, 2, 2, resident=0),
}
CORES_MXFP4 = Shape(256, 32, 4, 1)
MOST = 4096  # rows of x by which there must be so many, else there are no large tiles


@schedule(Linear, "gpu", "few rows: 16 weight rows a workgroup, k shared out; many: staged tiles")
def linear_gpu(op: Linear, p: GpuProfile, a: SimpleNamespace) -> None:
    """The path depends on the number of rows alone; both sizes of tiles give the same bits."""
    weights = weights_of(op.fmt, op.k, p, a)
    if not fits(p, *LOW):
        raise Refusal(f"{THREADS} threads with staged tiles of {LOW[0]} x {LOW[1]} do not fit")
    cases = _few_cases(op, p, a, weights)
    if able(p, op.fmt):
        return _branch(a.n, cases, partial(_many_on_cores, op, p, a, weights))
    most_low = max(LOW[0], HIGH[0] * BUSY // (op.groups * -(-op.rows // HIGH[1])))
    sizes = [LOW] if most_low > MOST or not fits(p, *HIGH) else [LOW, HIGH]
    product = product_of(p, op.act, sizes)
    many = [partial(_many, op, a, weights, product, *size) for size in sizes]
    if len(many) > 1:
        cases.append((most_low, many[0]))
    _branch(a.n, cases, many[-1])


def _few_cases(
    op: Linear, p: GpuProfile, a: SimpleNamespace, weights: Weights
) -> list[tuple[int, Emit]]:
    """(up to how many rows, what emits their path), for few rows.

    On tensor cores sums of bfloat16 weights are others than without, of MXFP4 weights all alike.
    """
    one, chunk = (partial(_few, op, p, a, weights, count) for count in (1, CHUNK))
    few = few_on_cores(p, op.fmt, op.k, op.act, exact=op.exact_rows > 0)
    if few is None:
        return [(1, one), (FEW, chunk)]
    most = FEW, partial(_few_on_cores, op, a, weights, few, few.most)
    if op.fmt == "mxfp4":
        return [(few.columns, partial(_few_on_cores, op, a, weights, few, 1)), most]
    return [(1, one), (CHUNK, chunk), most]


def _branch(n: Expr, cases: list[tuple[int, Emit]], last: Emit) -> None:
    """The first case whose number of rows is enough, decided on the host."""
    if not cases:
        return last()
    (most, emit), *rest = cases
    with T.If(n <= T.int32(most)):
        with T.Then():
            emit()
        with T.Else():
            _branch(n, rest, last)


def _few(op: Linear, p: GpuProfile, a: SimpleNamespace, weights: Weights, count: int) -> None:
    """Rows in chunks of `count`; one chunk when `count` is 1, for which there is a row only."""
    blocks, threads = -(-op.rows // BLOCK), threads_of(weights, p)
    chunks = T.int32(1) if count == 1 else (a.n + T.int32(count - 1)) // T.int32(count)
    with g.groups(chunks * T.int32(op.groups * blocks), threads) as (task, tid):
        # neighbouring workgroups share their weights
        first = g.let(T.truncmod(task, chunks) * T.int32(count))
        strip = g.let(T.truncdiv(task, chunks))
        group, block = g.let(strip // T.int32(blocks)), g.let(strip % T.int32(blocks))

        def x(i: int, k: Expr, lanes: int) -> Expr:
            row = T.min(first + T.int32(i), a.n - T.int32(1)) if count > 1 else T.int32(0)
            return g.load(a.x, row, _column(op, group, k), lanes=lanes)

        def finish(i: Expr, lane: Expr, value: Expr) -> None:
            row = g.let(block * T.int32(BLOCK) + lane)
            with g.when(T.And(row < T.int32(op.rows), first + i < a.n)):
                _store(op, a, first + i, group, row, value)

        matvec(Team(weights, threads, tid), _lead(op, group, block), x, count, finish)


def _few_on_cores(
    op: Linear, a: SimpleNamespace, weights: Weights, few: FewOnCores, fragments: int
) -> None:
    """Rows of x are prepared, once; then chunks of them, `fragments` at a time."""
    blocks, count, strips = -(-op.rows // BLOCK), fragments * few.columns, -(-op.rows // few.rows)

    def read(row: Expr, group: Expr, k: Expr, lanes: int) -> Expr:
        return g.load(a.x, row, _column(op, group, k), lanes=lanes)

    prepared = few.prepare(a.n, op.groups, read)
    chunks = (a.n + T.int32(count - 1)) // T.int32(count)
    with g.groups(chunks * T.int32(op.groups * strips), few.threads) as (task, tid):
        # neighbouring workgroups share their weights
        first = g.let(T.truncmod(task, chunks) * T.int32(count))
        group = g.let(T.truncdiv(task, chunks) // T.int32(strips))
        start = g.let(T.truncdiv(task, chunks) % T.int32(strips) * T.int32(few.rows // BLOCK))
        strip = Strip(
            weights,
            lead=lambda block: _lead(op, group, block),
            blocks=blocks,
            first=start,
            x=prepared,
            fragments=fragments,
            source=lambda i: (T.min(first + i, a.n - T.int32(1)), group),
            live=lambda i: first + i < a.n,
            thread=tid,
        )

        def finish(i: Expr, lane: Expr, value: Expr) -> None:
            row = g.let(start * T.int32(BLOCK) + lane)
            with g.when(T.And(row < T.int32(op.rows), first + i < a.n)):
                _store(op, a, first + i, group, row, value)

        few.matvec(strip, finish)


def _many(
    op: Linear, a: SimpleNamespace, weights: Weights, product: Product, height: int, width: int
) -> None:
    """All weight rows; those whose results stay float32 always have the exact product."""
    across = -(-op.rows // width)
    exact = 0 if is_exact(product) else -(-op.exact_rows // width)
    if exact:
        _strips(op, a, weights, matmul, (height, width), range(exact))
    if exact < across:
        _strips(op, a, weights, product, (height, width), range(exact, across))


def _strips(
    op: Linear,
    a: SimpleNamespace,
    weights: Weights,
    product: Product,
    size: tuple[int, int],
    strips: range,
    threads: int = THREADS,
    prepared: Any = None,
) -> None:
    """Some strips of `width` weight rows, for all rows of x, or of what was `prepared` of it."""
    height, width = size
    blocks, across = -(-op.rows // BLOCK), len(strips)
    tiles = (a.n + T.int32(height - 1)) // T.int32(height)

    def x(row: Expr, k: Expr, lanes: int) -> Expr:
        if prepared is not None:
            return prepared[row, group, k]
        return g.load(a.x, row, _column(op, group, k), lanes=lanes)

    with g.groups(tiles * T.int32(op.groups * across), threads) as (task, tid):
        # neighbouring workgroups share their weights
        first = g.let(T.truncmod(task, tiles) * T.int32(height))
        strip = g.let(T.truncdiv(task, tiles))
        group = g.let(strip // T.int32(across))
        column = strip % T.int32(across) + T.int32(strips.start)
        tile = Tile(
            weights,
            height,
            width,
            lead=lambda block: _lead(op, group, block),
            blocks=blocks,
            first=g.let(column * T.int32(width // BLOCK)),
            source=lambda i: g.let(T.min(first + i, a.n - T.int32(1))),
            x=x,
            thread=tid,
        )

        def finish(i: Expr, row: Expr, value: Expr) -> None:
            with g.when(T.And(first + i < a.n, row < T.int32(op.rows))):
                _store(op, a, first + i, group, row, value)

        product(tile, finish)


def _many_on_cores(op: Linear, p: GpuProfile, a: SimpleNamespace, weights: Weights) -> None:
    """Rows of x are split into parts, once; then tiles of two sizes with the same bits."""
    form = form_of(op.fmt, op.k, op.act, exact=op.exact_rows > 0)

    def read(row: Expr, group: Expr, k: Expr, lanes: int) -> Expr:
        return g.load(a.x, row, _column(op, group, k), lanes=lanes)

    prepared = split(form, a.n, op.groups, read)
    parts = PARTS[op.fmt][op.act]

    def high(count: int) -> Shape:
        return CORES_MXFP4 if op.fmt == "mxfp4" else CORES_HIGH[count]

    def strips(low: bool) -> None:
        done = 0
        for count, rows in ((form.parts, op.exact_rows), (parts, op.rows)):
            shape = CORES_LOW if low else high(count)
            stop = -(-rows // shape.rows)
            if stop > done:
                plan = Plan(shape, op.fmt, form, count, p.shared_bytes)
                size, these = (shape.tokens, shape.rows), range(done, stop)
                _strips(op, a, weights, product(plan), size, these, shape.threads, prepared)
            done = stop

    tiles = op.groups * -(-op.rows // high(parts).rows)
    most_low = high(parts).tokens * CORES_BUSY // tiles
    if most_low <= FEW:
        return strips(low=False)
    with T.If(a.n <= T.int32(most_low)):
        with T.Then():
            strips(low=True)
        with T.Else():
            strips(low=False)


def _lead(op: Linear, group: Expr, block: Expr) -> tuple[Expr, ...]:
    return (group, block) if op.groups > 1 else (block,)


def _column(op: Linear, group: Expr, k: Expr) -> Expr:
    """Where element k of a group's input is in a row of x; kept open, so that alignment shows."""
    start = T.int32(op.x_offset) + k
    return group * T.int32(op.x_stride) + start if op.groups > 1 else start


def _store(op: Linear, a: SimpleNamespace, t: Expr, group: Expr, row: Expr, value: Expr) -> None:
    """Round, add the addends, store."""
    column = g.let(group * T.int32(op.rows) + row)
    result = g.let(g.rounded(op.act, value))
    if op.exact_rows:
        result = g.let(T.Select(column < T.int32(op.exact_rows), value, result))
    for i in range(op.addends):
        result = g.let(g.rounded(op.act, result + getattr(a, f"addend{i}")[t, column]))
    g.store(a.out, result, t, column)
