"""The KDA state update token by token on a GPU: the state is read once and written once.

One workgroup has one head of one sequence, or some of its value columns: a thread keeps a few rows
of `lanes` neighbouring columns in registers. Per token, with the decayed key and query,

    predicted = (decay k) S        read = (decay q) S        write = beta (v - predicted)
    S = diag(decay) S + k write    out = read + (q . k) write

so that the output needs no second look at the state (specification 3.4). Key and query are used as
they come, and what would make units of them is multiplied to the results. There are three barriers
per token, and one more between tokens; a token is read while the one before it is worked on.
"""

from __future__ import annotations

from collections.abc import Iterator
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
DECAYED_KEY, DECAYED_QUERY, KEY, DECAY, QUERY = range(5)  # the shared vectors


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
        # through memory: TVM would divide anew, in 64 bits, for the index of each row
        head = g.let(g.variable(rest // T.int32(split.tiles), "int32")[0])
        tile = g.let(rest % T.int32(split.tiles))
        slot, first, rows = (g.let(a.seqs[s, T.int32(i)]) for i in range(3))
        h = Head.with_buffers(op, split, a, slot, head, tile, tid)
        with g.when(rows > T.int32(0)):
            h.fetch(first)
        h.read_state()
        with g.serial(rows) as t:
            with g.when(t > T.int32(0)):  # the same for all threads
                g.barrier()
            h.step(g.let(first + t), more=t + T.int32(1) < rows)
        h.write_state()


@dataclass(frozen=True)
class Inputs:
    """A token in registers: what one thread has of it."""

    channels: list[tuple[Any, Any, Any]]  # key, query, decay of each of its channels
    values: list[Any]  # of each column that it finishes
    beta: Any

    @classmethod
    def with_registers(cls, split: Split) -> Inputs:
        """Declare them; channels that do not exist change nothing."""
        channels, columns = split.bands * split.rows, split.width
        return cls(
            [
                (g.variable(0.0), g.variable(0.0), g.variable(0.0))
                for _ in range(-(-channels // split.threads))
            ],
            [g.variable(0.0) for _ in range(-(-columns // split.threads))],
            g.variable(0.0),
        )


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
    inputs: Inputs  # of the next token
    vectors: Any  # shared [5, padded key_dim]: decayed key, decayed query, key, decay, query
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
            inputs=Inputs.with_registers(split),
            vectors=g.shared(5 * split.bands * split.rows),
            parts=g.shared(3 * PARTS),
            sums=g.shared(split.bands * 2 * split.width),
            write=g.shared(split.width),
        )

    @property
    def padded(self) -> int:
        """key_dim rounded up to whole bands."""
        return self.split.bands * self.split.rows

    def vector(self, which: Any, index: Any) -> Any:
        """One of the vectors at a key channel."""
        return self.vectors[index + which * T.int32(self.padded)]

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

    def fetch(self, row: Any) -> None:
        """Read a token; long before it is needed."""
        op, a = self.op, self.a
        for turn, (key, query, decay) in enumerate(self.inputs.channels):
            d = g.let(self.tid + T.int32(turn * self.split.threads))
            with g.when(d < T.int32(op.key_dim)):
                at = g.let(self.head * T.int32(op.key_dim) + d)
                g.put(query, a.qkv[row, at])
                g.put(key, a.qkv[row, at + T.int32(op.heads * op.key_dim)])
                g.put(decay, a.decay[row, at])
        for value, column in self._columns():
            at = self.head * T.int32(op.value_dim) + column
            g.put(value, a.qkv[row, at + T.int32(2 * op.heads * op.key_dim)])
        g.put(self.inputs.beta, a.beta[row, self.head])

    def _columns(self) -> Iterator[tuple[Any, Any]]:
        """(register of its value, column of the head) of the columns that this thread finishes."""
        for turn, value in enumerate(self.inputs.values):
            c = g.let(self.tid + T.int32(turn * self.split.threads))
            column = g.let(self.base + c)
            inside = T.And(c < T.int32(self.split.width), column < T.int32(self.op.value_dim))
            with g.when(inside):
                yield value, column

    def step(self, row: Any, more: Any) -> None:
        """One token; the registers then have the next one, if there are more."""
        self._share_vectors()
        g.barrier()
        self._add_squares()
        self._read_sums()
        g.barrier()
        self._outputs(row)
        g.barrier()
        with g.when(more):
            self.fetch(row + T.int32(1))
        self._update()

    def _share_vectors(self) -> None:
        """Query and key as they are, and with the decay."""
        for turn, registers in enumerate(self.inputs.channels):
            d = g.let(self.tid + T.int32(turn * self.split.threads))
            with g.when(d < T.int32(self.padded)):
                key, query, decay = (r[0] for r in registers)
                for which, value in enumerate((key * decay, query * decay, key, decay, query)):
                    g.store(self.vectors, value, d + T.int32(which * self.padded))

    def _add_squares(self) -> None:
        """A share of q . q, k . k or q . k, for the first threads."""
        with g.strided(self.tid, 3 * PARTS, self.split.threads) as item:
            part, which = g.let(item % T.int32(PARTS)), g.let(item // T.int32(PARTS))
            x = g.let(T.Select(which == T.int32(1), T.int32(KEY), T.int32(QUERY)))
            y = g.let(T.Select(which == T.int32(0), T.int32(QUERY), T.int32(KEY)))
            total = g.variable(0.0)
            with g.strided(part, self.padded, PARTS) as d:
                g.put(total, total[0] + self.vector(x, d) * self.vector(y, d))
            g.store(self.parts, total[0], item)

    def _total(self, which: int) -> Any:
        """The sum of the shares of one of the three sums, the same for every thread."""
        totals = g.variable(g.splat(0.0, 4))
        with g.serial(PARTS // 4) as k:
            shares = g.load(self.parts, k * T.int32(4) + T.int32(which * PARTS), lanes=4)
            g.store(totals, g.load(totals, 0, lanes=4) + shares, 0, lanes=4)
        low, high = (totals[T.int32(i)] + totals[T.int32(i + 1)] for i in (0, 2))
        return g.let(low + high)

    def _rows(self, which: int) -> list[Any]:
        """One of the vectors at the rows of this thread."""
        rows = self.split.rows
        lanes = 4 if rows % 4 == 0 else 1
        first = self.band * T.int32(rows) + T.int32(which * self.padded)
        values = []
        for i in range(0, rows, lanes):
            x = g.let(g.load(self.vectors, first + T.int32(i), lanes=lanes))
            values += [g.lane(x, k) for k in range(lanes)] if lanes > 1 else [x]
        return values

    def _read_sums(self) -> None:
        """This band's part of predicted and read, for key and query as they are."""
        lanes, width = self.split.lanes, self.split.width
        for which in (DECAYED_KEY, DECAYED_QUERY):
            total = g.variable(g.splat(0.0, lanes))
            for i, x in enumerate(self._rows(which)):
                s = g.load(self.state, i * lanes, lanes=lanes)
                value = g.load(total, 0, lanes=lanes) + g.splat(x, lanes) * s
                g.store(total, value, 0, lanes=lanes)
            at = g.let(self.band * T.int32(2 * width) + self.column + T.int32(which * width))
            g.store(self.sums, g.load(total, 0, lanes=lanes), at, lanes=lanes)

    def _outputs(self, row: Any) -> None:
        """write = beta (v - predicted) and the output, one thread per column."""
        op, width = self.op, self.split.width
        for value, column in self._columns():
            query_2, key_2, product = (self._total(k) for k in range(3))
            query_scale = g.let(g.floats(op.key_dim**-0.5) / T.sqrt(query_2 + g.floats(L2_EPS)))
            key_scale = g.let(g.floats(1.0) / T.sqrt(key_2 + g.floats(L2_EPS)))
            c = g.let(column - self.base)
            totals = [g.variable(0.0) for _ in range(2)]
            with g.serial(self.split.bands) as band:
                for which, total in enumerate(totals):
                    at = band * T.int32(2 * width) + c + T.int32(which * width)
                    g.put(total, total[0] + self.sums[at])
            predicted, read = g.let(totals[0][0] * key_scale), g.let(totals[1][0] * query_scale)
            write = g.let(self.inputs.beta[0] * (value[0] - predicted))
            overlap = g.let(product * query_scale * key_scale)
            g.store(self.write, write * key_scale, c)
            self._finish(row, column, g.let(g.rounded(op.act, g.let(overlap * write + read))))

    def _finish(self, row: Any, column: Any, out: Any) -> None:
        """What becomes of an output of this head."""
        g.store(self.a.out, out, row, self.head * T.int32(self.op.value_dim) + column)

    def _update(self) -> None:
        """S = diag(decay) S + key write; columns that do not exist have what nobody stores."""
        lanes = self.split.lanes
        write = g.let(g.load(self.write, self.column, lanes=lanes))
        keys, decays = self._rows(KEY), self._rows(DECAY)
        for i, (key, decay) in enumerate(zip(keys, decays, strict=True)):
            s = g.load(self.state, i * lanes, lanes=lanes)
            new = g.splat(decay, lanes) * s + g.splat(key, lanes) * write
            g.store(self.state, new, i * lanes, lanes=lanes)
