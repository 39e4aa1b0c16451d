"""The operators of the family as data: the contract between the model and the kernels.

The Relax model calls these operators by name; `k3tvm.schedules` supplies a kernel for each on a
target. An operator is a frozen dataclass: its fields are everything that is known at compile time,
so two layers with equal fields share one kernel. Symbolic dimensions are strings:

    n      rows (tokens) of this call, all sequences together
    m      sequences of this call
    slots  sequences that the state tensors have room for
    cap    tokens that the latent cache of one slot has room for

`seqs` [m, 4] int32 describes the rows: (slot, first row, rows, position of the first row in its
sequence). Prefill is one sequence with many rows, decode is many sequences with one row each, and
nothing forbids a mixture. Activations are float32 buffers; with `act="bfloat16"` every kernel
rounds its result to bfloat16 where the official precision map does (specification 3.6b).
Weights come in the packed layouts of `k3tvm.schedules.layouts`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

Dim = int | str
Role = Literal["in", "inout", "out"]
Activation = Literal["float32", "bfloat16", "float16"]
WeightFormat = Literal["float32", "bfloat16", "mxfp4"]


@dataclass(frozen=True)
class Arg:
    """One tensor argument of an operator: name, shape (ints and symbols), dtype, direction."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str = "float32"
    role: Role = "in"


@dataclass(frozen=True)
class Operator:
    """Base of all operators. Kernel parameters are: `in` and `inout` in order, scalars, `out`."""

    scalars: ClassVar[tuple[str, ...]] = ()

    def arguments(self) -> tuple[Arg, ...]:
        """The tensors in kernel order."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The operator's name in lower snake case, e.g. `kda_step`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def key(self) -> str:
        """A name unique to this operator with these fields; the kernel's symbol in the library."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        words = [str(v).replace("e+", "e") for v in values]  # else 1e+20 and 1e-20 become one
        return re.sub(r"[^a-z0-9_]+", "m", "_".join([self.name, *words]).lower())


SEQS = Arg("seqs", ("m", 4), "int32")


def weight_args(
    name: str, lead: tuple[int, ...], rows: int, k: int, fmt: WeightFormat
) -> tuple[Arg, ...]:
    """Arguments of a packed weight [*lead, rows, k] (see `k3tvm.schedules.layouts`)."""
    blocks = -(-rows // 16)
    if fmt == "float32":
        return (Arg(name, (*lead, blocks, k, 16), "float32"),)
    if fmt == "bfloat16":
        return (Arg(name, (*lead, blocks, k, 8), "uint32"),)
    return (
        Arg(name, (*lead, blocks, k // 8, 16), "uint32"),
        Arg(f"{name}_scale", (*lead, blocks, k // 32, 16), "uint8"),
    )


# --- embedding, norms, residual attention -------------------------------------------------------


@dataclass(frozen=True)
class Embed(Operator):
    """out[t] = table[ids[t]]; the table is row-major, bfloat16 as uint16 or float32."""

    vocab: int
    width: int
    fmt: WeightFormat

    def arguments(self) -> tuple[Arg, ...]:
        dtype = "float32" if self.fmt == "float32" else "uint16"
        return (
            Arg("ids", ("n",), "int32"),
            Arg("table", (self.vocab, self.width), dtype),
            Arg("out", ("n", self.width), role="out"),
        )


@dataclass(frozen=True)
class RmsNorm(Operator):
    """out = weight * x / sqrt(mean(x^2) + eps) (specification 3.1); flags rows that are not finite.

    `health[site, slot]` becomes 1 when a row of that slot is not finite, so that a NaN in the
    logits can be traced to the layer that made it.
    """

    width: int
    eps: float
    act: Activation
    scalars: ClassVar[tuple[str, ...]] = ("site",)

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("x", ("n", self.width)),
            Arg("weight", (self.width,)),
            SEQS,
            Arg("health", ("sites", "slots"), "int32", "inout"),
            Arg("out", ("n", self.width), role="out"),
        )


@dataclass(frozen=True)
class AttnResNorm(Operator):
    """AttnRes mix of `count` bank entries and the stream, then RMSNorm (specification 3.3, 3.1).

    `query` is res_norm * res_proj in float32; `inverse_rms[s]` was computed when entry s was
    pushed. With count 0 the mix is the stream itself, exactly. In bfloat16 the mix is float32
    throughout, rounded once before the norm.
    """

    width: int
    entries: int
    eps: float
    act: Activation
    scalars: ClassVar[tuple[str, ...]] = ("count", "site")

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("bank", (self.entries, "n", self.width)),
            Arg("inverse_rms", (self.entries, "n")),
            Arg("stream", ("n", self.width)),
            Arg("query", (self.width,)),
            Arg("weight", (self.width,)),
            SEQS,
            Arg("health", ("sites", "slots"), "int32", "inout"),
            Arg("out", ("n", self.width), role="out"),
        )


@dataclass(frozen=True)
class BankPush(Operator):
    """bank[count] = stream, inverse_rms[count] = 1 / sqrt(mean(stream^2) + eps) per row."""

    width: int
    entries: int
    eps: float
    scalars: ClassVar[tuple[str, ...]] = ("count",)

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("stream", ("n", self.width)),
            Arg("bank", (self.entries, "n", self.width), role="inout"),
            Arg("inverse_rms", (self.entries, "n"), role="inout"),
        )


# --- matrix products ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear(Operator):
    """out[t, g] = W[g] @ x[t, x_offset + g*x_stride :][:k], then the addends, in order.

    x is [n, x_width]; a row of the result is [groups * rows]. `groups` > 1 is one matrix per head.
    In bfloat16 the product is rounded except its first `exact_rows` rows (router logits stay
    float32), and every sum with an addend is rounded again.
    """

    rows: int
    k: int
    fmt: WeightFormat
    act: Activation
    x_width: int
    x_offset: int = 0
    groups: int = 1
    x_stride: int = 0
    addends: int = 0
    exact_rows: int = 0

    def arguments(self) -> tuple[Arg, ...]:
        width = self.groups * self.rows
        lead = (self.groups,) if self.groups > 1 else ()
        return (
            Arg("x", ("n", self.x_width)),
            *weight_args("weight", lead, self.rows, self.k, self.fmt),
            *(Arg(f"addend{i}", ("n", width)) for i in range(self.addends)),
            Arg("out", ("n", width), role="out"),
        )


@dataclass(frozen=True)
class LastRows(Operator):
    """out[s] = x[last row of sequence s]."""

    width: int

    def arguments(self) -> tuple[Arg, ...]:
        return (Arg("x", ("n", self.width)), SEQS, Arg("out", ("m", self.width), role="out"))


# --- KDA ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShortConv(Operator):
    """SiLU of the causal depthwise convolution over the first `channels` columns of x (spec. 3.4).

    `tail` [slots, kernel-1, channels] holds the last inputs of each slot, oldest first, and is
    brought up to date. weight [kernel, channels], tap 0 oldest.
    """

    channels: int
    kernel: int
    x_width: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("x", ("n", self.x_width)),
            Arg("weight", (self.kernel, self.channels)),
            SEQS,
            Arg("tail", ("slots", self.kernel - 1, self.channels), role="inout"),
            Arg("out", ("n", self.channels), role="out"),
        )


@dataclass(frozen=True)
class KdaGate(Operator):
    """decay = exp(g) and beta = sigmoid(b) (specification 3.4).

    g = lower_bound * sigmoid(a * (raw + dt_bias)), or -a * softplus(raw + dt_bias) when
    `lower_bound` is None; a = exp(A_log) per head. b is x[:, b_offset : b_offset + heads].
    """

    heads: int
    dim: int
    lower_bound: float | None
    x_width: int
    b_offset: int

    def arguments(self) -> tuple[Arg, ...]:
        width = self.heads * self.dim
        return (
            Arg("raw", ("n", width)),
            Arg("x", ("n", self.x_width)),
            Arg("dt_bias", (width,)),
            Arg("a", (self.heads,)),
            Arg("decay", ("n", width), role="out"),
            Arg("beta", ("n", self.heads), role="out"),
        )


@dataclass(frozen=True)
class _Kda(Operator):
    heads: int
    key_dim: int
    value_dim: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        h, k, v = self.heads, self.key_dim, self.value_dim
        return (
            Arg("qkv", ("n", h * (2 * k + v))),
            Arg("decay", ("n", h * k)),
            Arg("beta", ("n", h)),
            SEQS,
            Arg("state", ("slots", h, k, v), role="inout"),
            Arg("out", ("n", h * v), role="out"),
        )


@dataclass(frozen=True)
class KdaStep(_Kda):
    """One token per sequence: the gated delta rule, state in place (specification 3.4).

    qkv rows are [q: heads*key_dim | k: heads*key_dim | v: heads*value_dim], already convolved;
    q and k are L2-normalised here (eps 1e-6 on the sum), q scaled by key_dim^-0.5.
    """


@dataclass(frozen=True)
class KdaChunk(_Kda):
    """Any number of tokens per sequence: the same function as `KdaStep` in chunks (spec. 3.5)."""


@dataclass(frozen=True)
class GatedRmsNorm(Operator):
    """out = o / sqrt(mean(o^2) + eps) * weight * sigmoid(z), per head (specification 3.4).

    z is gate[:, z_offset : z_offset + heads*dim]; gate is [n, z_width].
    """

    heads: int
    dim: int
    eps: float
    z_width: int
    z_offset: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        width = self.heads * self.dim
        return (
            Arg("o", ("n", width)),
            Arg("gate", ("n", self.z_width)),
            Arg("weight", (self.dim,)),
            Arg("out", ("n", width), role="out"),
        )


@dataclass(frozen=True)
class KdaStepFused(Operator):
    """`ShortConv`, `KdaGate`, `KdaStep` and `GatedRmsNorm` of a layer in one operator.

    x, raw, write and gate are what the projections gave: qkv before the convolution in the first
    3*heads*dim columns of x; b is write[:, b_offset : b_offset + heads].
    """

    heads: int
    dim: int
    kernel: int
    lower_bound: float | None
    eps: float
    x_width: int
    b_width: int
    b_offset: int
    z_width: int
    z_offset: int
    act: Activation

    @property
    def conv(self) -> ShortConv:
        """The first part."""
        return ShortConv(3 * self.heads * self.dim, self.kernel, self.x_width, self.act)

    @property
    def gates(self) -> KdaGate:
        """The second."""
        return KdaGate(self.heads, self.dim, self.lower_bound, self.b_width, self.b_offset)

    @property
    def step(self) -> KdaStep:
        """The third."""
        return KdaStep(self.heads, self.dim, self.dim, self.act)

    @property
    def norm(self) -> GatedRmsNorm:
        """The last."""
        return GatedRmsNorm(self.heads, self.dim, self.eps, self.z_width, self.z_offset, self.act)

    def arguments(self) -> tuple[Arg, ...]:
        width = self.heads * self.dim
        return (
            Arg("x", ("n", self.x_width)),
            Arg("taps", (self.kernel, 3 * width)),
            Arg("raw", ("n", width)),
            Arg("write", ("n", self.b_width)),
            Arg("dt_bias", (width,)),
            Arg("a", (self.heads,)),
            Arg("gate", ("n", self.z_width)),
            Arg("weight", (self.dim,)),
            SEQS,
            Arg("tail", ("slots", self.kernel - 1, 3 * width), role="inout"),
            Arg("state", ("slots", self.heads, self.dim, self.dim), role="inout"),
            Arg("out", ("n", width), role="out"),
        )


# --- MLA ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlaCache(Operator):
    """Norms of the MLA low-rank projections; the cache row of each token is written.

    x [n, x_width] holds at `q_offset` the query latent (q_rank values; 0 = the model has none) and
    at `kv_offset` [c_kv: rank | k_pe: rope]. query = rms(q latent, q_norm, eps); cache[slot,
    position] = [rms(c_kv, kv_norm, eps) | k_pe] (specification 3.6). Without a query latent
    q_norm and query have one column and are neither read nor meaningful.
    """

    q_rank: int
    rank: int
    rope: int
    eps: float
    x_width: int
    q_offset: int
    kv_offset: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        q = max(self.q_rank, 1)
        return (
            Arg("x", ("n", self.x_width)),
            Arg("q_norm", (q,)),
            Arg("kv_norm", (self.rank,)),
            SEQS,
            Arg("cache", ("slots", "cap", self.rank + self.rope), role="inout"),
            Arg("query", ("n", q), role="out"),
        )


@dataclass(frozen=True)
class MlaAttention(Operator):
    """Causal attention of absorbed queries over the latent cache (specification 3.6).

    score[t, h, j] = (absorbed[t, h] . cache[slot, j, :rank] + q_pe[t, h] . cache[slot, j, rank:])
    * scale for j <= position of t; out[t, h] = softmax(score) @ cache[slot, :, :rank].
    q_pe[t, h] = q[t, q_offset + h*q_stride + nope :][:rope]. In bfloat16 the probabilities are
    rounded before the weighted sum.
    """

    heads: int
    rank: int
    rope: int
    nope: int
    scale: float
    q_width: int
    q_offset: int
    q_stride: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("absorbed", ("n", self.heads * self.rank)),
            Arg("q", ("n", self.q_width)),
            Arg("cache", ("slots", "cap", self.rank + self.rope)),
            SEQS,
            Arg("out", ("n", self.heads * self.rank), role="out"),
        )


@dataclass(frozen=True)
class SigmoidGate(Operator):
    """out = o * sigmoid(gate[:, z_offset : z_offset + width]) (specification 3.6)."""

    width: int
    z_width: int
    z_offset: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("o", ("n", self.width)),
            Arg("gate", ("n", self.z_width)),
            Arg("out", ("n", self.width), role="out"),
        )


# --- feed-forward -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Glu(Operator):
    """out = act(gate, up) (specification 3.7); each row of x has `parts` pairs [gate | up].

    Pair p of row t is x[t, offset + p*2*width :][: 2*width]; out is [n, parts * width].
    `kind` "situ": beta*tanh(g/beta)*sigmoid(g) * linear_beta*tanh(u/linear_beta), the up side left
    alone when linear_beta is None. `kind` "silu": g*sigmoid(g)*u.
    """

    width: int
    parts: int
    x_width: int
    offset: int
    kind: Literal["situ", "silu"]
    beta: float
    linear_beta: float | None
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("x", ("n", self.x_width)),
            Arg("out", ("n", self.parts * self.width), role="out"),
        )


@dataclass(frozen=True)
class Router(Operator):
    """Top-k expert choice with bias (specification 3.7).

    logits are x[:, :experts]. score = sigmoid(logit); pick = score + bias; where groups > keep,
    only the `keep` groups with the largest sum of their two best picks take part. The k largest
    picks win, the lower expert on a tie, in descending order. weights = scores of the chosen,
    divided by (their sum + 1e-20) if `renormalize`, times `scale`. A row with NaN still gives
    k distinct valid experts.
    """

    experts: int
    top_k: int
    groups: int
    keep: int
    renormalize: bool
    scale: float
    x_width: int

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("x", ("n", self.x_width)),
            Arg("bias", (self.experts,)),
            Arg("experts", ("n", self.top_k), "int32", "out"),
            Arg("weights", ("n", self.top_k), role="out"),
        )


@dataclass(frozen=True)
class ExpertSort(Operator):
    """Stable counting sort of the n*top_k (row, choice) pairs by expert.

    Pairs of expert e are order[first[e] : first[e+1]], each pair = row * top_k + choice.
    """

    experts: int
    top_k: int

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("chosen", ("n", self.top_k), "int32"),
            Arg("first", (self.experts + 1,), "int32", "out"),
            Arg("order", ("n", self.top_k), "int32", "out"),
        )


@dataclass(frozen=True)
class ExpertLinear(Operator):
    """out[t, c] = W[chosen[t, c]] @ x[t, c] for every choice c of every row.

    x is [n, x_width] at x_offset, shared by the choices, or [n, top_k * k] when `per_choice`;
    out is [n, top_k * rows]. Grouped by expert through `ExpertSort`; MXFP4 is decoded inside.
    """

    experts: int
    top_k: int
    rows: int
    k: int
    fmt: WeightFormat
    per_choice: bool
    x_width: int
    x_offset: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("x", ("n", self.x_width)),
            *weight_args("weight", (self.experts,), self.rows, self.k, self.fmt),
            Arg("chosen", ("n", self.top_k), "int32"),
            Arg("first", (self.experts + 1,), "int32"),
            Arg("order", ("n", self.top_k), "int32"),
            Arg("out", ("n", self.top_k * self.rows), role="out"),
        )


@dataclass(frozen=True)
class ExpertCombine(Operator):
    """out = sum over choices of weights[t, c] * y[t, c], then RMSNorm if `norm`, then the addends.

    float32 sum; in bfloat16 rounded after the sum, after the norm and after each addend
    (specification 3.6b, 3.7).
    """

    top_k: int
    width: int
    norm: bool
    eps: float
    addends: int
    act: Activation

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("y", ("n", self.top_k * self.width)),
            Arg("weights", ("n", self.top_k)),
            Arg("norm_weight", (self.width if self.norm else 1,)),
            *(Arg(f"addend{i}", ("n", self.width)) for i in range(self.addends)),
            Arg("out", ("n", self.width), role="out"),
        )


# --- sampling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample(Operator):
    """The next token of each row of logits: greedy, or drawn after top-k and top-p.

    A row of `controls` is [temperature, top_p, u, unused]. Temperature 0: the largest logit, the
    lower id on a tie. Else probabilities are exp((logit - largest) / temperature); the `top_k`
    most likely tokens are kept (0: all), of those the ones before which less than top_p of their
    mass comes, the lower id first on a tie; the token is the one where the running sum over the
    kept ones, in the order of ids, passes u (0 <= u < 1) of their mass. NaN is never chosen, unless
    all logits of a row are NaN (then 0 is).
    """

    vocab: int

    def arguments(self) -> tuple[Arg, ...]:
        return (
            Arg("logits", ("m", self.vocab)),
            Arg("controls", ("m", 4)),
            Arg("top_k", ("m",), "int32"),
            Arg("ids", ("m",), "int32", "out"),
        )
