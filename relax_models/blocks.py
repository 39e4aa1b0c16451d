"""What every block of the model is written with: weights by checkpoint name, linear layers, norms.

A block is one half of a layer (a mixer or a feed-forward part), built once per kind of layer as a
private Relax function; layers of one kind call the same function with their own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from k3tvm.relax_models.config import ModelConfig
from k3tvm.relax_models.graph import Expr, Graph, Scope, Slice
from k3tvm.relax_models.operators import (
    SEQS,
    Activation,
    Arg,
    AttnResNorm,
    Embed,
    Linear,
    Operator,
    RmsNorm,
    WeightFormat,
)
from k3tvm.relax_models.parameters import FormatOf, Parameter, Recipe

Form = Literal["step", "chunk"]
HEALTH = Arg("health", ("sites", "slots"), "int32")
LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Segment:
    """Part of a stacked projection: a name, its rows, and the checkpoint matrices it stacks."""

    name: str
    rows: int
    stems: tuple[str, ...]


@dataclass
class Blocks:
    """Builds blocks for one entry function: configuration, number policy, form of the KDA kernel.

    `formats` records which checkpoint matrix was found in which format while a block was built, so
    that another layer may use the block only when its matrices are stored alike. `fused`: what lies
    between the projections of a KDA step is one operator.
    """

    config: ModelConfig
    graph: Graph
    format_of: FormatOf
    act: Activation
    form: Form
    layer: int = 0
    formats: dict[str, WeightFormat] = field(default_factory=dict)
    fused: bool = False

    @property
    def scope(self) -> Scope:
        """The function being built."""
        return self.graph.scope

    @property
    def bank_entries(self) -> int:
        """Entries of the AttnRes bank: one per started block of layers."""
        size = self.config.attn_res_block_size
        return -(-self.config.num_layers // size) if size else 0

    def name(self, stem: str) -> str:
        """A checkpoint name as stored, with its prefix; `{layer}` stays."""
        return self.config.tensor_prefix + stem

    def stored(self, stems: Sequence[str]) -> WeightFormat:
        """The common format of matrices that are stacked; mixed BF16 and F32 become float32."""
        found = []
        for stem in stems:
            full = self.name(stem)
            concrete = full.replace("{layer}", str(self.layer)).replace("{expert}", "0")
            self.formats[full] = self.format_of(concrete)
            found.append(self.formats[full])
        return found[0] if len(set(found)) == 1 else "float32"

    def vector(self, name: str, size: int, recipe: Recipe, *sources: str, rows: int = 0) -> Expr:
        """A float32 vector parameter made of whole checkpoint tensors."""
        full = tuple(self.name(s) for s in sources)
        return self.scope.weight(Parameter(name, (size,), "float32", recipe, full, rows=rows))

    def table(self, op: Embed, stem: str) -> list[Expr]:
        """The row-major embedding table in its stored dtype."""
        arg = op.arguments()[1]
        shape = (op.vocab, op.width)
        full = (self.name(stem),)
        parameter = Parameter("table", shape, arg.dtype, "table", full, op.fmt, rows=op.vocab)
        return [self.scope.weight(parameter)]

    def taps(self, name: str, taps: int, channels: int, sources: Sequence[str]) -> Expr:
        """Depthwise filters of several tensors as one parameter [taps, channels] float32."""
        full = tuple(self.name(s) for s in sources)
        return self.scope.weight(Parameter(name, (taps, channels), "float32", "conv", full))

    def matrix(
        self, name: str, op: Operator, recipe: Recipe, stems: Sequence[str], **facts: int
    ) -> list[Expr]:
        """The packed weight arguments of `op`, made of checkpoint matrices."""
        full = tuple(self.name(s) for s in stems)
        args = [a for a in op.arguments() if a.name.startswith("weight")]
        fmt: WeightFormat = getattr(op, "fmt", "float32")
        result = []
        for a in args:
            scales = a.name.endswith("_scale")
            part: Literal["values", "scales"] = "scales" if scales else "values"
            label = f"{name}.{'scale' if scales else 'weight'}"
            shape = tuple(int(d) for d in a.shape)
            parameter = Parameter(label, shape, a.dtype, recipe, full, fmt, part=part, **facts)
            result.append(self.scope.weight(parameter))
        return result

    def linear(
        self, name: str, rows: int, k: int, x: Slice, stem: str, addends: Sequence[Expr] = ()
    ) -> Slice:
        """x times one checkpoint matrix, plus the addends."""
        fmt = self.stored([stem])
        op = Linear(rows, k, fmt, self.act, x.width, x.offset, addends=len(addends))
        weight = self.matrix(name, op, "rows", [stem], rows=rows)
        return Slice(self.graph.call(op, x.tensor, *weight, *addends), rows)

    def project(
        self, name: str, k: int, x: Slice, segments: Sequence[Segment], exact: str = ""
    ) -> dict[str, Slice]:
        """Several projections of the same input: one launch per weight format.

        Returns a slice per segment. The segment named `exact` stays float32 in bfloat16 mode; it
        must come first.
        """
        groups: dict[WeightFormat, list[Segment]] = {}
        for s in segments:
            groups.setdefault(self.stored(s.stems), []).append(s)
        found: dict[str, Slice] = {}
        for fmt, members in groups.items():
            rows = sum(s.rows for s in members)
            kept = members[0].rows if members[0].name == exact else 0
            op = Linear(rows, k, fmt, self.act, x.width, x.offset, exact_rows=kept)
            stems = [stem for s in members for stem in s.stems]
            label = f"{name}.{'_'.join(s.name for s in members)}"
            out = self.graph.call(op, x.tensor, *self.matrix(label, op, "rows", stems, rows=rows))
            at = 0
            for s in members:
                found[s.name] = Slice(out, rows, at)
                at += s.rows
        return found

    def mix_and_norm(self, stream: Stream, norm: str, res: str) -> Slice:
        """The normed input of a block: AttnRes mix if the model has it, then RMSNorm.

        `norm` and `res` are checkpoint stems (`...input_layernorm`, `...self_attention_res`).
        """
        c, d = self.config, self.config.hidden_size
        weight = self.vector("norm", d, "vector", f"{norm}.weight")
        if not c.attn_res_block_size:
            op: Operator = RmsNorm(d, c.rms_norm_eps, self.act)
            args = (stream.value, weight, stream.seqs, stream.health)
            return Slice(self.graph.call(op, *args, scalars=[stream.site]), d)
        query = self.vector("query", d, "product", f"{res}_norm.weight", f"{res}_proj.weight")
        op = AttnResNorm(d, self.bank_entries, c.rms_norm_eps, self.act)
        args = (*stream.bank, stream.value, query, weight, stream.seqs, stream.health)
        out = self.graph.call(op, *args, scalars=[stream.count, stream.site])
        return Slice(out, d)


@dataclass(frozen=True)
class Stream:
    """The residual stream as a block sees it: values, AttnRes bank, rows, and where it stands."""

    value: Expr
    bank: tuple[Expr, ...]
    seqs: Expr
    health: Expr
    count: Expr
    site: Expr


def declare_stream(blocks: Blocks) -> Stream:
    """Declare the inputs that all blocks have in common, in the order in which they are passed."""
    s, d, entries = blocks.scope, blocks.config.hidden_size, blocks.bank_entries
    value = s.input(Arg("stream", ("n", d)))
    bank: tuple[Expr, ...] = ()
    if entries:
        bank = (
            s.input(Arg("bank", (entries, "n", d))),
            s.input(Arg("inverse_rms", (entries, "n"))),
        )
    seqs, health = s.input(SEQS), s.input(HEALTH)
    return Stream(value, bank, seqs, health, s.scalar("count"), s.scalar("site"))


BlockBody = Callable[[Blocks, Stream], Expr]
