"""The KDA state update token by token on a GPU: the state is read once and written once.

One workgroup has one head of one sequence, or some of its value columns: a thread keeps a few rows
of `lanes` neighbouring columns in registers. Per token, with the decayed key and query,

    predicted = (decay k) S        read = (decay q) S        write = beta (v - predicted)
    S = diag(decay) S + k write    out = read + (q . k) write

so that the output needs no second look at the state (specification 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk, KdaStep
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.kda_split import Split, split_of
from k3tvm.schedules.kda_step import L2_EPS
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import schedule

PARTS = 16  # threads that share each sum over the key width


@schedule(KdaStep, "gpu", "one workgroup per head of a sequence, its state in registers")
def kda_step_gpu(op: KdaStep, p: GpuProfile, a: SimpleNamespace) -> None:
    """The rows of a sequence one after the other; heads are independent."""
    run_steps(op, p, a)


def run_steps(op: KdaStep | KdaChunk, p: GpuProfile, a: SimpleNamespace) -> None:
    """One launch over sequences, heads and tiles of columns."""
    split = split_of(op, p)
    per_sequence = op.heads * split.tiles
    with g.groups(a.m * T.int32(per_sequence), split.threads) as (group, tid):
        s, rest = g.let(group // T.int32(per_sequence)), g.let(group % T.int32(per_sequence))
        head, tile = g.let(rest // T.int32(split.tiles)), g.let(rest % T.int32(split.tiles))
        h = Head.with_buffers(op, split, a, g.let(a.seqs[s, T.int32(0)]), head, tile, tid)
        h.read_state()
        first = g.let(a.seqs[s, T.int32(1)])
        with g.serial(a.seqs[s, T.int32(2)]) as t:
            h.step(g.let(first + t))
        h.write_state()


@dataclass(frozen=True)
class Head:
    """One workgroup's share of a head, as one of its threads sees it."""

    op: KdaStep | KdaChunk
    split: Split
    a: SimpleNamespace
    slot: Any
    head: Any
    tid: Any
    band: Any  # which rows: band*rows ...
    column: Any  # first column of this thread in the tile
    base: Any  # first column of the tile
    state: Any  # registers [rows, lanes]
    vectors: Any  # shared [4, padded key_dim]: decayed key, decayed query, key, decay
    parts: Any  # shared [3, PARTS]: sums of squares of q and k, and q . k
    sums: Any  # shared [bands, 2, width]: predicted and read of each band
    write: Any  # shared [width]

    @classmethod
    def with_buffers(
        cls,
        op: KdaStep | KdaChunk,
        split: Split,
        a: SimpleNamespace,
        slot: Any,
        head: Any,
        tile: Any,
        tid: Any,
    ) -> Head:
        """Declare the memory; rows past key_dim have vectors of zeros."""
        return cls(
            op,
            split,
            a,
            slot,
            head,
            tid,
            band=g.let(tid // T.int32(split.columns)),
            column=g.let(tid % T.int32(split.columns) * T.int32(split.lanes)),
            base=g.let(tile * T.int32(split.width)),
            state=g.local(split.rows * split.lanes),
            vectors=g.shared(4 * split.bands * split.rows),
            parts=g.shared(3 * PARTS),
            sums=g.shared(split.bands * 2 * split.width),
            write=g.shared(split.width),
        )

    @property
    def padded(self) -> int:
        """key_dim rounded up to whole bands."""
        return self.split.bands * self.split.rows

    def vector(self, which: int, index: Any) -> Any:
        """One of the four vectors at a key channel."""
        return self.vectors[index + T.int32(which * self.padded)]

    def each_row(self, body: Any) -> None:
        """body(i, row of the state) for the rows of this thread that exist."""
        exact = self.padded == self.op.key_dim and self.split.tiles * self.split.width == (
            self.op.value_dim
        )
        for i in range(self.split.rows):
            row = g.let(self.band * T.int32(self.split.rows) + T.int32(i))
            if exact:
                body(i, row)
            else:
                inside = T.And(
                    row < T.int32(self.op.key_dim),
                    self.base + self.column < T.int32(self.op.value_dim),
                )
                with g.when(inside):
                    body(i, row)

    def read_state(self) -> None:
        """Registers from memory; what does not exist is zero."""
        lanes = self.split.lanes
        if self.padded != self.op.key_dim or self.op.value_dim % self.split.width:
            for i in range(self.split.rows):
                g.store(self.state, g.splat(0.0, lanes), i * lanes, lanes=lanes)

        def body(i: int, row: Any) -> None:
            at = (g.wide(self.slot), self.head, row, self.base + self.column)
            g.store(self.state, g.load(self.a.state, *at, lanes=lanes), i * lanes, lanes=lanes)

        self.each_row(body)

    def write_state(self) -> None:
        """Memory from registers."""
        lanes = self.split.lanes

        def body(i: int, row: Any) -> None:
            at = (g.wide(self.slot), self.head, row, self.base + self.column)
            g.store(self.a.state, g.load(self.state, i * lanes, lanes=lanes), *at, lanes=lanes)

        self.each_row(body)

    def step(self, row: Any) -> None:
        """One token."""
        self._read_vectors(row)
        overlap = self._weigh_vectors(row)
        self._read_sums()
        self._outputs(row, overlap)
        self._update()

    def _read_vectors(self, row: Any) -> None:
        """Query and key as they are, then the shares of their sums."""
        op = self.op
        with g.strided(self.tid, self.padded, self.split.threads) as d:
            query, key = g.variable(0.0), g.variable(0.0)
            with g.when(d < T.int32(op.key_dim)):
                at = g.let(self.head * T.int32(op.key_dim) + d)
                g.put(query, self.a.qkv[row, at])
                g.put(key, self.a.qkv[row, at + T.int32(op.heads * op.key_dim)])
            g.store(self.vectors, key[0], d)
            g.store(self.vectors, query[0], d + T.int32(self.padded))
        g.barrier()
        with g.strided(self.tid, PARTS, self.split.threads) as part:
            sums = [g.variable(0.0) for _ in range(3)]
            with g.strided(part, self.padded, PARTS) as d:
                key, query = g.let(self.vector(0, d)), g.let(self.vector(1, d))
                for total, (x, y) in zip(
                    sums, ((query, query), (key, key), (query, key)), strict=True
                ):
                    g.put(total, total[0] + x * y)
            for k, total in enumerate(sums):
                g.store(self.parts, total[0], part + T.int32(k * PARTS))
        g.barrier()

    def _weigh_vectors(self, row: Any) -> Any:
        """Unit key and query with the decay; returns q . k."""
        op = self.op
        query_2, key_2, product = (self._total(k) for k in range(3))
        query_scale = g.let(g.floats(op.key_dim**-0.5) / T.sqrt(query_2 + g.floats(L2_EPS)))
        key_scale = g.let(g.floats(1.0) / T.sqrt(key_2 + g.floats(L2_EPS)))
        with g.strided(self.tid, self.padded, self.split.threads) as d:
            decay = g.variable(0.0)
            with g.when(d < T.int32(op.key_dim)):
                g.put(decay, self.a.decay[row, self.head * T.int32(op.key_dim) + d])
            key = g.let(self.vector(0, d) * key_scale)
            query = g.let(self.vector(1, d) * query_scale)
            for which, value in enumerate((key * decay[0], query * decay[0], key, decay[0])):
                g.store(self.vectors, value, d + T.int32(which * self.padded))
        g.barrier()
        return g.let(product * query_scale * key_scale)

    def _total(self, which: int) -> Any:
        """The sum of the shares of one of the three sums, the same for every thread."""
        total = g.variable(0.0)
        with g.serial(PARTS) as k:
            g.put(total, total[0] + self.parts[k + T.int32(which * PARTS)])
        return g.let(total[0])

    def _read_sums(self) -> None:
        """This band's part of predicted and read."""
        lanes, width = self.split.lanes, self.split.width
        sums = [g.variable(g.splat(0.0, lanes)) for _ in range(2)]
        for i in range(self.split.rows):
            row = g.let(self.band * T.int32(self.split.rows) + T.int32(i))
            s = g.let(g.load(self.state, i * lanes, lanes=lanes))
            for which, total in enumerate(sums):
                x = g.splat(g.let(self.vector(which, row)), lanes)
                g.store(total, g.load(total, 0, lanes=lanes) + x * s, 0, lanes=lanes)
        for which, total in enumerate(sums):
            at = g.let(self.band * T.int32(2 * width) + self.column + T.int32(which * width))
            g.store(self.sums, g.load(total, 0, lanes=lanes), at, lanes=lanes)
        g.barrier()

    def _outputs(self, row: Any, overlap: Any) -> None:
        """write = beta (v - predicted) and the output, one thread per column."""
        op, a, width = self.op, self.a, self.split.width
        beta = g.let(a.beta[row, self.head])
        with g.strided(self.tid, width, self.split.threads) as c:
            column = g.let(self.base + c)
            write = g.variable(0.0)
            with g.when(column < T.int32(op.value_dim)):
                totals = [g.variable(0.0) for _ in range(2)]
                with g.serial(self.split.bands) as band:
                    for which, total in enumerate(totals):
                        at = band * T.int32(2 * width) + c + T.int32(which * width)
                        g.put(total, total[0] + self.sums[at])
                predicted, read = (g.let(total[0]) for total in totals)
                at = g.let(self.head * T.int32(op.value_dim) + column)
                value = a.qkv[row, at + T.int32(2 * op.heads * op.key_dim)]
                g.put(write, beta * (value - predicted))
                out = g.let(overlap * write[0] + read)
                g.store(a.out, g.rounded(op.act, out), row, at)
            g.store(self.write, write[0], c)
        g.barrier()

    def _update(self) -> None:
        """S = diag(decay) S + key write.

        No barrier follows: the next token stores undecayed vectors first, which nobody reads here.
        """
        lanes = self.split.lanes
        write = g.let(g.load(self.write, self.column, lanes=lanes))
        for i in range(self.split.rows):
            row = g.let(self.band * T.int32(self.split.rows) + T.int32(i))
            key = g.splat(g.let(self.vector(2, row)), lanes)
            decay = g.splat(g.let(self.vector(3, row)), lanes)
            s = g.load(self.state, i * lanes, lanes=lanes)
            g.store(self.state, decay * s + key * write, i * lanes, lanes=lanes)
