"""Routed experts on a GPU: products of pairs (row, choice), which are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import ExpertLinear
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.products import BLOCK, Weights, weights_of
from k3tvm.schedules.gpu.products_few import Team, matvec, threads_of
from k3tvm.schedules.gpu.products_few_cores import few_on_cores
from k3tvm.schedules.gpu.products_few_strip import FewOnCores, Strip
from k3tvm.schedules.gpu.products_many import fits
from k3tvm.schedules.gpu.products_matrix import product_of
from k3tvm.schedules.gpu.products_mma import product as product_on_cores
from k3tvm.schedules.gpu.products_mma_plan import Plan, Shape, able
from k3tvm.schedules.gpu.products_split import form_of, split
from k3tvm.schedules.gpu.products_tile import THREADS, Product, Tile
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule

Expr = Any

# Pairs per expert, on average, below which
ALONE = 0.5  # each pair reads its weights for itself
FEW = 12  # chunks of a few pairs do, else tiles
FEW_ON_CORES = {"mxfp4": 6, "bfloat16": 12}  # where those tiles are of tensor cores too
CHUNK = 4
HEIGHT, WIDTH = 32, 64  # pairs and weight rows of a tile
CORES = {"mxfp4": Shape(256, 32, 4, 1), "bfloat16": Shape(128, 32, 2, 2)}  # on tensor cores


@schedule(
    ExpertLinear, "gpu", "few pairs: 16 weight rows of a pair a workgroup; many: staged tiles"
)
def expert_linear_gpu(op: ExpertLinear, p: GpuProfile, a: SimpleNamespace) -> None:
    """The path depends on the number of rows alone, never on their routing."""
    if not fits(p, HEIGHT, WIDTH):
        raise Refusal(f"{THREADS} threads with staged tiles of {HEIGHT} x {WIDTH} do not fit")
    weights = weights_of(op.fmt, op.k, p, a)
    pairs = a.n * T.int32(op.top_k)

    cores = few_on_cores(p, op.fmt, op.k, op.act)
    most_few = FEW_ON_CORES[op.fmt] if cores else FEW

    def few(count: int) -> None:
        if cores and (count > 1 or op.fmt == "mxfp4"):
            _few_on_cores(op, a, weights, cores, 1 if count == 1 else cores.most)
        else:
            _few(op, p, a, weights, count)

    with T.If(T.Or(a.n == T.int32(1), pairs < T.int32(int(ALONE * op.experts)))):
        with T.Then():
            few(1)
        with T.Else(), T.If(pairs < T.int32(most_few * op.experts)):
            with T.Then():
                few(CHUNK)
            with T.Else():
                if able(p, op.fmt):
                    _many_on_cores(op, p, a, weights)
                else:
                    _many(op, a, weights, product_of(p, op.act, [(HEIGHT, WIDTH)]))


def _few(op: ExpertLinear, p: GpuProfile, a: SimpleNamespace, weights: Weights, count: int) -> None:
    """A workgroup for each pair and block, which also does the next pairs of its expert.

    Pairs that others do have no work. Neighbouring workgroups share an expert and thereby caches.
    """
    blocks, threads = -(-op.rows // BLOCK), threads_of(weights, p)
    pairs = a.n * T.int32(op.top_k)
    with g.groups(pairs * T.int32(blocks), threads) as (task, tid):
        block, first = g.let(T.truncdiv(task, pairs)), g.let(T.truncmod(task, pairs))
        expert = T.Bind(_at(op, a.chosen, T.Bind(_at(op, a.order, first))))
        team, lead = Team(weights, threads, tid), (expert, block)
        if count == 1:
            _chunk(op, a, team, lead, 1, first, first + T.int32(1))
            return
        begin, end = T.Bind(a.first[expert]), T.Bind(a.first[expert + T.int32(1)])
        with g.when((first - begin) % T.int32(count) == T.int32(0)):
            _chunk(op, a, team, lead, count, first, end)


def _chunk(
    op: ExpertLinear,
    a: SimpleNamespace,
    team: Team,
    lead: tuple[Expr, Expr],
    count: int,
    first: Expr,
    end: Expr,
) -> None:
    """Pairs first ... first + count - 1 in expert order, as far as they are before `end`."""

    def pair(i: Expr) -> tuple[Expr, Expr]:
        return _split(op, T.Bind(_at(op, a.order, g.let(T.min(first + i, end - T.int32(1))))))

    places = [pair(T.int32(i)) for i in range(count)]

    def x(i: int, k: Expr, lanes: int) -> Expr:
        row, choice = places[i]
        return g.load(a.x, row, _column(op, choice, k), lanes=lanes)

    def finish(i: Expr, lane: Expr, value: Expr) -> None:
        column = g.let(lead[1] * T.int32(BLOCK) + lane)
        with g.when(T.And(column < T.int32(op.rows), first + i < end)):
            _store(op, a, *pair(i), column, value)

    matvec(team, lead, x, count, finish)


def _few_on_cores(
    op: ExpertLinear, a: SimpleNamespace, weights: Weights, few: FewOnCores, fragments: int
) -> None:
    """Rows of x are prepared, once; then chunks of pairs, `fragments` at a time, as in `_few`."""
    blocks, count = -(-op.rows // BLOCK), fragments * few.columns
    choices, pairs = op.top_k if op.per_choice else 1, a.n * T.int32(op.top_k)

    def read(row: Expr, choice: Expr, k: Expr, lanes: int) -> Expr:
        return g.load(a.x, row, _column(op, choice, k), lanes=lanes)

    prepared = few.prepare(a.n, choices, read)
    with g.groups(pairs * T.int32(-(-op.rows // few.rows)), few.threads) as (task, tid):
        first = g.let(T.truncmod(task, pairs))
        start = g.let(T.truncdiv(task, pairs) * T.int32(few.rows // BLOCK))
        expert = T.Bind(_at(op, a.chosen, T.Bind(_at(op, a.order, first))))
        begin, end = T.Bind(a.first[expert]), T.Bind(a.first[expert + T.int32(1)])

        def pair(i: Expr) -> tuple[Expr, Expr]:
            return _split(op, T.Bind(_at(op, a.order, g.let(T.min(first + i, end - T.int32(1))))))

        def source(i: Expr) -> tuple[Expr, Expr]:
            row, choice = pair(i)
            return row, choice if op.per_choice else T.int32(0)

        def finish(i: Expr, lane: Expr, value: Expr) -> None:
            column = g.let(start * T.int32(BLOCK) + lane)
            with g.when(T.And(column < T.int32(op.rows), first + i < end)):
                _store(op, a, *pair(i), column, value)

        strip = Strip(
            weights,
            lead=lambda block: (expert, block),
            blocks=blocks,
            first=start,
            x=prepared,
            fragments=fragments,
            source=source,
            live=lambda i: first + i < end,
            thread=tid,
        )
        with g.when((first - begin) % T.int32(count) == T.int32(0)):
            few.matvec(strip, finish)


def _many(op: ExpertLinear, a: SimpleNamespace, weights: Weights, product: Product) -> None:
    """Tiles of pairs whose rows are read from x."""

    def x(at: tuple[Expr, Expr], k: Expr, lanes: int) -> Expr:
        return g.load(a.x, at[0], _column(op, at[1], k), lanes=lanes)

    _tiles(op, a, weights, (HEIGHT, WIDTH), THREADS, x, lambda _: product)


def _many_on_cores(op: ExpertLinear, p: GpuProfile, a: SimpleNamespace, weights: Weights) -> None:
    """Rows of x are split into parts, once; then tiles of pairs."""
    choices = op.top_k if op.per_choice else 1

    def read(row: Expr, choice: Expr, k: Expr, lanes: int) -> Expr:
        return g.load(a.x, row, _column(op, choice, k), lanes=lanes)

    form, shape = form_of(op.fmt, op.k, op.act), CORES[op.fmt]
    prepared = split(form, a.n, choices, read)
    plan = Plan(shape, op.fmt, form, form.parts, p.shared_bytes)

    def x(at: tuple[Expr, Expr], word: Expr, lanes: int) -> Expr:
        return prepared[at[0], at[1] if op.per_choice else T.int32(0), word]

    def product(count: Expr) -> Product:
        return product_on_cores(plan, count)

    _tiles(op, a, weights, (shape.tokens, shape.rows), shape.threads, x, product)


def _tiles(
    op: ExpertLinear,
    a: SimpleNamespace,
    weights: Weights,
    size: tuple[int, int],
    threads: int,
    x: Callable[[Any, Expr, int], Expr],
    product: Callable[[Expr], Product],
) -> None:
    """Tiles of pairs that share an expert; there may be fewer tiles than workgroups.

    product(count): what multiplies a tile that has `count` pairs, or more than fit.
    """
    height, width = size
    blocks, across = -(-op.rows // BLOCK), -(-op.rows // width)
    pairs = a.n * T.int32(op.top_k)
    slots = pairs // T.int32(height) + T.int32(op.experts)
    with g.groups(slots * T.int32(across), threads) as (task, tid):
        slot = g.let(T.truncmod(task, slots))
        expert = g.let(_expert_of(op, a, slot, height))
        begin, end = T.Bind(a.first[expert]), T.Bind(a.first[expert + T.int32(1)])
        first = g.let(begin + (slot - _slot(begin, expert, height)) * T.int32(height))
        with g.when(first < end):
            tile = Tile(
                weights,
                height,
                width,
                lead=lambda block: (expert, block),
                blocks=blocks,
                first=g.let(T.truncdiv(task, slots) * T.int32(width // BLOCK)),
                source=lambda i: _split(
                    op, T.Bind(_at(op, a.order, g.let(T.min(first + i, end - T.int32(1)))))
                ),
                x=x,
                thread=tid,
            )

            def finish(i: Expr, column: Expr, value: Expr) -> None:
                with g.when(T.And(first + i < end, column < T.int32(op.rows))):
                    row, choice = _split(op, T.Bind(_at(op, a.order, first + i)))
                    _store(op, a, row, choice, column, value)

            product(g.let(end - first))(tile, finish)


def _slot(begin: Expr, expert: Expr, height: int) -> Expr:
    """The first tile of an expert whose pairs begin at `begin`.

    It grows by one at least with every expert, and leaves room for all tiles of an expert.
    """
    return begin // T.int32(height) + expert


def _expert_of(op: ExpertLinear, a: SimpleNamespace, slot: Expr, height: int) -> Expr:
    """The last expert whose first tile is not after `slot`, by bisection."""
    low, high = g.variable(0, "int32"), g.variable(op.experts, "int32")
    with g.serial((op.experts - 1).bit_length()):
        middle = g.let(g.variable((low[0] + high[0]) // T.int32(2))[0])
        with T.If(_slot(a.first[middle], middle, height) <= slot):
            with T.Then():
                g.put(low, middle)
            with T.Else():
                g.put(high, middle)
    return low[0]


def _at(op: Any, table: Any, i: Expr) -> Expr:
    """Element i of a table [n, top_k]."""
    return table[i // T.int32(op.top_k), i % T.int32(op.top_k)]


def _split(op: ExpertLinear, pair: Expr) -> tuple[Expr, Expr]:
    """(row, choice) of a pair."""
    return g.let(pair // T.int32(op.top_k)), g.let(pair % T.int32(op.top_k))


def _column(op: ExpertLinear, choice: Expr, k: Expr) -> Expr:
    """Where element k of a choice's input is in a row of x."""
    start = T.int32(op.x_offset) + k
    return choice * T.int32(op.k) + start if op.per_choice else start


def _store(
    op: ExpertLinear, a: SimpleNamespace, row: Expr, choice: Expr, column: Expr, value: Expr
) -> None:
    g.store(a.out, g.rounded(op.act, value), row, choice * T.int32(op.rows) + column)
