"""The KDA state update of many tokens on CUDA's tensor cores.

The same formulas as in `k3tvm.schedules.gpu.kda_chunk`, transposed: a warp has 16 value columns of
the state, S^T, in its registers, as the accumulators of m16n8k16 products lie. The result of one
product is where the next one wants its left operand, so

    Y^T = V^T - S^T (A k)^T     O^T = S^T (A q)^T + Y^T W^T     U^T = Y^T T^T
    S^T = A_last S^T + U^T ((A_last / A_j) k_j)

need shared memory for keys and queries only. Sums and the state are float32. An operand is split
into two float16 parts, 22 bits, and three products: each row of the left one, S^T, Y^T or U^T, gets
the power of two that brings its largest element below 2^15; keys, queries, T and W, at most one,
get a fixed one (decays are at most one, beta as well, so no T or W can be larger: each step of the
delta rule is a contraction).

No row depends on a later one, to the last bit, unless NaN comes in: zero times NaN would carry it
back to earlier rows, so a warp that meets one takes it out of the product and puts it back after.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaChunk
from k3tvm.schedules.gpu import cores
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu import kda_stage as stage
from k3tvm.schedules.gpu.kda_pairs import ROW_T, ROW_W, ROWS, pair_launch
from k3tvm.schedules.gpu.kda_stage import MOST_KEYS, PITCH, SCALE, THREADS, Stage, padded_keys
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule

COLUMNS = 16  # of a warp
WIDTH = THREADS // 32 * COLUMNS  # columns of a workgroup
INFINITY = 0x7F800000
NAN = 0x7FC00000


@schedule(KdaChunk, "gpu", "tensor cores; 64 columns of a head's state in registers")
def kda_mma_gpu(op: KdaChunk, p: GpuProfile, a: SimpleNamespace) -> None:
    """Two launches: what does not see the state, and what does."""
    if "tensor_core" not in p.features:
        raise Refusal(f"{p.name} has no tensor cores that take float16")
    if op.key_dim > MOST_KEYS:
        raise Refusal(f"key_dim {op.key_dim}: a workgroup reads {MOST_KEYS} channels at most")
    tiles = -(-op.value_dim // WIDTH)
    pairs_of = pair_launch(op, a)
    per_sequence = op.heads * tiles
    with g.groups(a.m * T.int32(per_sequence), THREADS) as (group, tid):
        s, rest = g.let(group // T.int32(per_sequence)), g.let(group % T.int32(per_sequence))
        # through memory: TVM would divide anew, in 64 bits, for the index of each row
        head = g.let(g.variable(rest // T.int32(tiles), "int32")[0])
        tile = g.let(rest % T.int32(tiles))
        w = Warp.with_buffers(Stage.with_buffers(op, a, pairs_of, head, tid), tile, tid)
        slot, first, rows = (g.let(a.seqs[s, T.int32(i)]) for i in range(3))
        w.read_state(slot)
        stage.read(w.stage, first, rows)
        stage.share(w.stage)
        g.barrier()
        with g.serial((rows + T.int32(ROWS - 1)) // T.int32(ROWS)) as c:
            start, left = g.let(first + c * T.int32(ROWS)), g.let(rows - c * T.int32(ROWS))
            stage.store(w.stage)
            g.barrier()
            stage.read(w.stage, start + T.int32(ROWS), left - T.int32(ROWS))
            with g.when(w.column < T.int32(op.value_dim)):
                w.chunk(start, left)
            stage.share(w.stage)
            g.barrier()
        w.write_state(slot)


@dataclass(frozen=True)
class Warp:
    """16 columns of the state, as one lane sees them: rows of fragments are columns of the state.

    Registers of a fragment: [row `lane / 4` or eight below, two columns]. Row r of the fragments is
    value column 2 r, the row eight below is 2 r + 1: what a lane reads lies together.
    """

    stage: Stage
    column: Any  # the first column of the warp
    value: Any  # the first of the two columns of this lane
    row: Any  # lane / 4: which column of a right operand this lane holds
    quad: Any  # lane % 4
    state: Any  # registers [fragments of channels, 4]

    @classmethod
    def with_buffers(cls, t: Stage, tile: Any, tid: Any) -> Warp:
        """Declare the memory."""
        column = g.let(tile * T.int32(WIDTH) + tid // T.int32(32) * T.int32(COLUMNS))
        row, quad = g.let(tid % T.int32(32) // T.int32(4)), g.let(tid % T.int32(4))
        value = g.let(column + row * T.int32(2))
        return cls(t, column, value, row, quad, g.local(padded_keys(t.op) // 8 * 4))

    @property
    def fragments(self) -> int:
        """Fragments of eight channels."""
        return padded_keys(self.stage.op) // 8

    def read_state(self, slot: Any) -> None:
        """Registers from memory; what does not exist is zero."""
        for i in range(self.fragments * 4):
            g.put(self.state, g.floats(0.0), i)
        for i, at in self._state_rows(slot):
            with g.when(at[2] < T.int32(self.stage.op.key_dim)):
                self._each_value(lambda lanes, k, at=at, i=i: self._take(lanes, k, at, i))

    def _take(self, lanes: int, k: int, at: tuple[Any, ...], i: int) -> None:
        value = g.let(g.load(self.stage.a.state, *at, self.value + T.int32(k), lanes=lanes))
        for j in range(lanes):
            element = value if lanes == 1 else g.lane(value, j)
            g.put(self.state, element, i + 2 * (j + k))

    def write_state(self, slot: Any) -> None:
        """Memory from registers."""
        for i, at in self._state_rows(slot):
            pair = [self.state[T.int32(i)], self.state[T.int32(i + 2)]]
            with g.when(at[2] < T.int32(self.stage.op.key_dim)):
                self._put_values(self.stage.a.state, at, pair)

    def _state_rows(self, slot: Any) -> Any:
        """(register of the first column, index of the row) of the channels of this lane."""
        for n in range(self.fragments):
            for e in range(2):
                channel = g.let(self.quad * T.int32(2) + T.int32(8 * n + e))
                yield 4 * n + e, (g.wide(slot), self.stage.head, channel)

    def _each_value(self, body: Any) -> None:
        """body(lanes, offset) for this lane's two columns: at once where rows are aligned."""
        width = self.stage.op.value_dim
        lanes = 2 if width % 2 == 0 else 1
        for k in range(0, 2, lanes):
            with g.when(self.value + T.int32(k) < T.int32(width)):
                body(lanes, k)

    def _put_values(self, target: Any, at: tuple[Any, ...], pair: list[Any], base: Any = 0) -> None:
        """target[at, base + value ...] = pair."""
        both = g.local(2)
        for k, value in enumerate(pair):
            g.put(both, value, k)
        self._each_value(
            lambda lanes, k: g.store(
                target, g.load(both, k, lanes=lanes), *at, self.value + k + base, lanes=lanes
            )
        )

    def chunk(self, start: Any, count: Any) -> None:
        """The products of one chunk."""
        values = self._read_values(start, count)
        matrices = [self._read_rows(start, count, at) for at in (ROW_T, ROW_W)]
        sums, scales = self._times_state()
        for i in range(8):
            old = sums[T.int32(i)] * scales[i % 4 // 2]
            g.put(values, values[T.int32(i)] - old, i)
        bad = Bad.find(values, self.quad)
        scales_of_y = [_scale_of(m) for m in bad.largest]
        high, low = _left_operand(values, [s for s, _ in scales_of_y])
        write, read = (g.local(8) for _ in range(2))
        for target, matrix in ((write, matrices[0]), (read, matrices[1])):
            for tile in range(2):
                _clear(target, 4 * tile, 4)
                words = _right_operand(matrix, 4 * tile)
                _multiply(target, 4 * tile, high, low, words)
        for i in range(8):
            half = i % 4 // 2
            out = sums[T.int32(8 + i)] * scales[half]
            g.put(read, read[T.int32(i)] * scales_of_y[half][1] + out, i)
        bad.restore(write)
        bad.restore(read)
        self._store_outputs(read, start, count)
        self._update(write, [inverse for _, inverse in scales_of_y])

    def _rows(self) -> Any:
        """(register, row of the chunk) of the results of this lane, without the second column."""
        for tile in range(2):
            for e in range(2):
                yield 4 * tile + e, g.let(self.quad * T.int32(4) + T.int32(2 * tile + e))

    def _read_values(self, start: Any, count: Any) -> Any:
        """The values of this lane's rows and columns, as a result has them."""
        op, a = self.stage.op, self.stage.a
        values = g.local(8)
        _clear(values, 0, 8)
        base = 2 * op.heads * op.key_dim

        def take(lanes: int, k: int, i: int, row: Any) -> None:
            at = self.stage.head * T.int32(op.value_dim) + self.value + T.int32(base + k)
            value = g.let(g.load(a.qkv, row, at, lanes=lanes))
            for j in range(lanes):
                g.put(values, value if lanes == 1 else g.lane(value, j), i + 2 * (j + k))

        for i, row in self._rows():
            with g.when(row < count):
                self._each_value(lambda lanes, k, i=i, row=row: take(lanes, k, i, start + row))
        return values

    def _read_rows(self, start: Any, count: Any, which: int) -> Any:
        """This lane's part of T or W as right operands: [fragment of rows, 4 columns]."""
        result = g.local(8)
        _clear(result, 0, 8)
        for tile in range(2):
            i = g.let(
                self.row // T.int32(2) * T.int32(4) + self.row % T.int32(2) + T.int32(2 * tile)
            )
            j = g.let(self.quad * T.int32(4))
            with g.when(T.And(i < count, j <= i)):
                at = (start + i, self.stage.head, T.int32(which) + j)
                g.store(result, g.load(self.stage.pairs_of, *at, lanes=4), 4 * tile, lanes=4)
                for k in range(1, 4):
                    with g.when(j + T.int32(k) > i):
                        g.put(result, g.floats(0.0), 4 * tile + k)
        return result

    def _times_state(self) -> tuple[Any, list[Any]]:
        """S^T times the mixed rows [rows of keys, rows of queries]; what undoes its scales."""
        sums = g.local(16)
        _clear(sums, 0, 16)
        scales = [_scale_of(self._largest(half)) for half in range(2)]
        steps = self.fragments // 2
        lane = g.let((self.row * T.int32(4) + self.quad) * T.int32(4))
        for step in range(steps):
            high, low = _left_operand(self.state, [s for s, _ in scales], 8 * step)
            for n in range(4):
                words = g.local(4, "uint32")
                at = lane + T.int32((n * steps + step) * PITCH)
                g.store(words, g.load(self.stage.mixed, at, lanes=4), 0, lanes=4)
                _multiply(sums, 4 * n, high, low, words)
        return sums, [inverse for _, inverse in scales]

    def _largest(self, half: int) -> Any:
        """The bits of the largest magnitude of a row of S^T."""
        largest = g.variable(0.0)
        for n in range(self.fragments):
            for e in range(2):
                value = self.state[T.int32(4 * n + 2 * half + e)]
                g.put(largest, T.max(largest[0], T.abs(value)))
        return _quad_max(g.bits(largest[0], "int32"))

    def _store_outputs(self, outputs: Any, start: Any, count: Any) -> None:
        op = self.stage.op
        base = g.let(self.stage.head * T.int32(op.value_dim))
        for i, row in self._rows():
            pair = [g.let(g.rounded(op.act, outputs[T.int32(i + 2 * k)])) for k in range(2)]
            with g.when(row < count):
                self._put_values(self.stage.a.out, (start + row,), pair, base)

    def _update(self, write: Any, scales: list[Any]) -> None:
        """S^T = A_last S^T + U^T times the late keys, eight channels at a time.

        write: U^T times the scales of Y. It gets its own: where the largest Y is forgotten within
        the chunk, U is far below it.
        """
        bits = g.local(2, "int32")
        _take_largest(write, bits)
        own = [_scale_of(bits[T.int32(half)]) for half in range(2)]
        high, low = _left_operand(write, [scale for scale, _ in own])
        back = [g.let(inverse * of_y) for (_, inverse), of_y in zip(own, scales, strict=True)]
        for n in range(self.fragments):
            words, sums = g.local(4, "uint32"), g.local(4)
            _clear(sums, 0, 4)
            at = stage.late_at(T.int32(8 * n) + self.row, self.quad)
            g.store(words, g.load(self.stage.late, at, lanes=4), 0, lanes=4)
            _multiply(sums, 0, high, low, words)
            for i in range(4):
                total = self.stage.total[self.quad * T.int32(2) + T.int32(8 * n + i % 2)]
                change = sums[T.int32(i)] * back[i // 2]
                g.put(self.state, total * self.state[T.int32(4 * n + i)] + change, 4 * n + i)


@dataclass(frozen=True)
class Bad:
    """Elements of Y that are not finite, per row of the fragment: taken out, and put back.

    first: the first row of the chunk that has one, 16 for none. Rows from there on are NaN.
    """

    found: Any
    first: Any  # registers [2]
    largest: list[Any]  # bits of the largest magnitude that is left
    quad: Any

    @classmethod
    def find(cls, values: Any, quad: Any) -> Bad:
        """Look at all, and replace what is not finite by zero."""
        bits = g.local(2, "int32")
        first = g.local(2, "int32")
        _take_largest(values, bits)
        for half in range(2):
            g.put(first, T.int32(ROWS), half)
        worst = T.max(bits[T.int32(0)], bits[T.int32(1)])
        found = g.let(
            T.call_extern("int32", "k3_warp_any", T.Cast("int32", worst >= T.int32(INFINITY)))
        )
        with g.when(found != T.int32(0)):
            for i in reversed(range(8)):
                half, row = i % 4 // 2, quad * T.int32(4) + T.int32(i // 4 * 2 + i % 2)
                magnitude = T.bitwise_and(g.bits(values[T.int32(i)], "int32"), T.int32(0x7FFFFFFF))
                with g.when(magnitude >= T.int32(INFINITY)):
                    g.put(first, row, half)
                    g.put(values, g.floats(0.0), i)
            for half in range(2):
                g.put(first, -_quad_max(-first[T.int32(half)]), half)
            _take_largest(values, bits)
        return cls(found, first, [bits[T.int32(half)] for half in range(2)], quad)

    def restore(self, results: Any) -> None:
        """NaN in every row from the first bad one on."""
        with g.when(self.found != T.int32(0)):
            nan = g.variable(T.int32(NAN), "int32")
            for i in range(8):
                row = self.quad * T.int32(4) + T.int32(i // 4 * 2 + i % 2)
                with g.when(row >= self.first[T.int32(i % 4 // 2)]):
                    g.put(results, g.bits(nan[0], "float32"), i)


def _take_largest(values: Any, bits: Any) -> None:
    """bits[half]: the largest magnitude of a row of the fragments, over its four lanes."""
    for half in range(2):
        g.put(bits, T.int32(0), half)
        for i in (0, 1, 4, 5):
            own = g.bits(values[T.int32(i + 2 * half)], "int32")
            own = T.bitwise_and(own, T.int32(0x7FFFFFFF))
            g.put(bits, T.max(bits[T.int32(half)], own), half)
        g.put(bits, _quad_max(bits[T.int32(half)]), half)


def _quad_max(value: Any) -> Any:
    """The largest over the four lanes of a row."""
    return g.let(T.call_extern("int32", "k3_quad_max", value))


def _scale_of(largest: Any) -> tuple[Any, Any]:
    """The power of two that brings a magnitude below 2^15; what undoes it, and `SCALE`.

    Magnitudes below 2^-97 stay smaller; what is not finite stays that.
    """
    exponent = T.max(T.min(largest >> T.int32(23), T.int32(254)), T.int32(30))
    exponent = g.let(g.variable(exponent, "int32")[0])
    up = g.bits((T.int32(268) - exponent) << T.int32(23), "float32")
    down = g.bits((exponent - T.int32(28)) << T.int32(23), "float32")
    return g.let(up), g.let(down)


def _left_operand(values: Any, scales: list[Any], first: int = 0) -> tuple[Any, Any]:
    """Two result fragments [2, 4] as the left operand of a product: high and low parts."""
    high, low = g.local(4, "uint32"), g.local(4, "uint32")
    for i in range(4):
        pair = (g.let(values[T.int32(first + 2 * i + e)] * scales[i % 2]) for e in range(2))
        for target, word in zip((high, low), stage.split(*pair), strict=True):
            g.put(target, word, i)
    return high, low


def _right_operand(values: Any, first: int) -> Any:
    """Four elements, at most one, as the right operand of a product."""
    words = g.local(4, "uint32")
    for i in range(2):
        pair = (g.let(values[T.int32(first + 2 * i + e)] * g.floats(SCALE)) for e in range(2))
        for part, word in enumerate(stage.split(*pair)):
            g.put(words, word, 2 * part + i)
    return words


def _multiply(sums: Any, first: int, high: Any, low: Any, words: Any) -> None:
    """sums[first : first + 4] += left operand times right operand."""
    at = [(sums, first), (high, 0), (low, 0), (words, 0)]
    cores.do("mma_f16x3", *(cores.pointer(buffer, i) for buffer, i in at))


def _clear(values: Any, first: int, count: int) -> None:
    for i in range(count):
        g.put(values, g.floats(0.0), first + i)
