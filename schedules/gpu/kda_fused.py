"""All of a KDA layer between its projections in one kernel on a GPU, for single tokens.

Convolution, gates, state update and gated norm of a head need nothing of other heads, so the
workgroup that has the head's state in registers does them on its way: four launches become one,
and what they would hand over stays in registers and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from k3tvm._tvm import T
from k3tvm.relax_models.operators import KdaStepFused
from k3tvm.schedules.gpu import functions as f
from k3tvm.schedules.gpu import grid as g
from k3tvm.schedules.gpu.kda_gate import gated_rms_norm_gpu, kda_gate_gpu, log_decay
from k3tvm.schedules.gpu.kda_split import split_of
from k3tvm.schedules.gpu.kda_step import Head, kda_step_gpu
from k3tvm.schedules.gpu.short_conv import short_conv_gpu, store_tail, window_of
from k3tvm.schedules.kda_fused import Parts, run_parts
from k3tvm.schedules.profile import GpuProfile
from k3tvm.schedules.registry import Refusal, schedule


@schedule(KdaStepFused, "gpu", "one workgroup per head of a sequence does all that a head needs")
def kda_fused_gpu(op: KdaStepFused, p: GpuProfile, a: SimpleNamespace) -> None:
    """The rows of a sequence one after the other; the tail of the convolution at the end."""
    split = split_of(op.step, p)
    if split.tiles > 1:
        raise Refusal(f"dim {op.dim}: several workgroups share the state of a head")
    with g.groups(a.m * T.int32(op.heads), split.threads) as (group, tid):
        s, head = g.let(group // T.int32(op.heads)), g.let(group % T.int32(op.heads))
        head = g.let(g.variable(head, "int32")[0])  # as in `run_steps`
        slot, first, rows = (g.let(a.seqs[s, T.int32(i)]) for i in range(3))
        step = Head.with_buffers(op.step, split, a, slot, head, T.int32(0), tid)
        own = [g.variable(0.0) for _ in step.inputs.values]
        h = FusedHead(**vars(step), fused=op, first=first, gates=own, outputs=g.shared(op.dim))
        with g.serial(rows) as t:
            with g.when(t > T.int32(0)):  # the same for all threads
                g.barrier()
            h.read_token(t)
            with g.when(t == T.int32(0)):
                h.read_state()
            h.step_and_norm(g.let(first + t))
        with g.when(rows > T.int32(0)):
            h.write_state()
            h.write_tail(rows)


@schedule(KdaStepFused, "gpu", "its four parts one after the other")
def kda_parts_gpu(op: KdaStepFused, p: GpuProfile, a: SimpleNamespace) -> None:
    """Where a head does not fit one workgroup."""
    parts = Parts(short_conv_gpu, kda_gate_gpu, kda_step_gpu, gated_rms_norm_gpu)
    run_parts(op, p, a, parts, g.workspace)


@dataclass(frozen=True)
class FusedHead(Head):
    """A head with its convolution, gates and norm."""

    fused: KdaStepFused
    first: Any  # row of the sequence
    gates: list[Any]  # registers: the output gate of each column that this thread finishes
    outputs: Any  # shared [dim]

    def read_token(self, t: Any) -> None:
        """Key, query, decay, values, beta and output gates of a token of the sequence."""
        op, a = self.fused, self.a
        row = g.let(self.first + t)
        for turn, (key, query, decay) in enumerate(self.inputs.channels):
            d = g.let(self.tid + T.int32(turn * self.split.threads))
            with g.when(d < T.int32(op.dim)):
                column = g.let(self.head * T.int32(op.dim) + d)
                g.put(query, self._convolved(t, column))
                g.put(key, self._convolved(t, g.let(column + T.int32(op.heads * op.dim))))
                g.put(decay, f.exp(log_decay(op.gates, a, row, column)))
        for (value, c), gate in zip(self._columns(), self.gates, strict=True):
            column = g.let(self.head * T.int32(op.dim) + c)
            g.put(value, self._convolved(t, g.let(column + T.int32(2 * op.heads * op.dim))))
            g.put(gate, f.sigmoid(a.gate[row, column + T.int32(op.z_offset)]))
        g.put(self.inputs.beta, f.sigmoid(a.write[row, self.head + T.int32(op.b_offset)]))

    def _convolved(self, t: Any, channel: Any) -> Any:
        """SiLU of the convolution at row t of the sequence, oldest input first, rounded."""
        op, a = self.fused, self.a
        window = window_of(op.conv, a, self.slot, self.first, t, channel)
        g.put(window, a.x[self.first + t, channel], op.kernel - 1)
        y = g.variable(0.0)
        for j in range(op.kernel):
            g.put(y, y[0] + a.taps[T.int32(j), channel] * window[T.int32(j)])
        return g.let(g.rounded(op.act, f.silu(y[0])))

    def _finish(self, row: Any, column: Any, out: Any) -> None:
        g.store(self.outputs, out, column)

    def step_and_norm(self, row: Any) -> None:
        """One token; norm and gate come with the update of the state."""
        self._share_vectors()
        g.barrier()
        self._add_squares()
        self._read_sums()
        g.barrier()
        self._outputs(row)
        g.barrier()
        self._norm(row)
        self._update()

    def _norm(self, row: Any) -> None:
        """Gated norm of the outputs (specification 3.4); each thread adds up all squares."""
        op, a = self.fused, self.a
        lanes = 4 if op.dim % 4 == 0 else 1
        for (_, column), gate in zip(self._columns(), self.gates, strict=True):
            squares = g.variable(g.splat(0.0, lanes))
            with g.serial(op.dim // lanes) as i:
                o = g.let(g.load(self.outputs, i * T.int32(lanes), lanes=lanes))
                g.store(squares, g.load(squares, 0, lanes=lanes) + o * o, 0, lanes=lanes)
            total = squares[T.int32(0)]
            for k in range(1, lanes):
                total = total + squares[T.int32(k)]
            mean = g.let(total * g.floats(1.0 / op.dim))
            unit = self.outputs[column] / T.sqrt(mean + g.floats(op.eps))
            value = g.let(unit * a.weight[column] * gate[0])
            at = g.let(self.head * T.int32(op.dim) + column)
            g.store(a.out, g.rounded(op.act, value), row, at)

    def write_tail(self, rows: Any) -> None:
        """The last inputs of this head's channels; each was read by the thread that writes it."""
        op = self.fused
        for turn in range(len(self.inputs.channels)):
            d = g.let(self.tid + T.int32(turn * self.split.threads))
            with g.when(d < T.int32(op.dim)):
                for part in range(2):
                    self._write_tail_of(rows, g.let(d + T.int32(part * op.heads * op.dim)))
        for _, column in self._columns():
            self._write_tail_of(rows, g.let(column + T.int32(2 * op.heads * op.dim)))

    def _write_tail_of(self, rows: Any, d: Any) -> None:
        op = self.fused
        channel = g.let(self.head * T.int32(op.dim) + d)
        window = window_of(op.conv, self.a, self.slot, self.first, rows, channel)
        store_tail(op.conv, self.a, window, self.slot, channel)
