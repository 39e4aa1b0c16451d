"""The whole model as one IRModule: entry functions, the blocks they share, parameters and state.

Entries, all `(ids, seqs, health, states, weights) -> (logits, experts)`:

    prefill  any rows of any sequences; logits of the last row of each sequence [m, vocab]
    decode   one row per sequence; logits [m, vocab]
    logits   any rows; logits of every row [n, vocab]

and `sample(logits, controls, top_k) -> ids` [m], which draws tokens where the logits are
(`operators.Sample`).

`experts` are the choices [n, k] of each MoE layer: a comparison can tell a tie from a fault.

States are changed in place. `health` [sites, slots] is raised where the stream is not finite: site
2i is the input of layer i's mixer, 2i+1 of its feed-forward part, the last one the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3tvm._tvm import relax
from k3tvm.relax_models.attention_kda import kda_mixer, kda_states
from k3tvm.relax_models.attention_mla import mla_mixer, mla_states
from k3tvm.relax_models.blocks import (
    HEALTH,
    Blocks,
    Form,
    Stream,
    declare_stream,
)
from k3tvm.relax_models.config import ModelConfig
from k3tvm.relax_models.graph import Expr, Function, Graph, Scope, Slice
from k3tvm.relax_models.moe import dense_block, moe_block
from k3tvm.relax_models.operators import (
    SEQS,
    Activation,
    Arg,
    BankPush,
    Embed,
    LastRows,
    Operator,
    Sample,
    WeightFormat,
)
from k3tvm.relax_models.parameters import FormatOf, Parameter

ENTRIES: dict[str, Form] = {"prefill": "chunk", "logits": "chunk", "decode": "step"}
CAPTURED = "decode_captured"


@dataclass(frozen=True)
class Model:
    """What the compiler takes: the module, its operators by key, and the layout of its data.

    parameters and states are in the order of the tuples that the entries take; state shapes have
    the symbols `slots` and `cap`.
    """

    config: ModelConfig
    act: Activation
    module: Any
    operators: dict[str, Operator]
    parameters: tuple[Parameter, ...]
    states: tuple[Arg, ...]

    @property
    def sites(self) -> int:
        """Rows of the health tensor."""
        return 2 * self.config.num_layers + 1


def build_model(
    config: ModelConfig,
    format_of: FormatOf,
    act: Activation,
    entries: tuple[str, ...] = (),
    captured: bool = False,
    rows: int = 256,
) -> Model:
    """The model of a configuration; `format_of` says how each checkpoint matrix is stored.

    With `captured` there is one more entry, `decode_captured`: decode in the form that becomes one
    CUDA graph. It calls no functions of blocks, but has their operators one after the other, and
    takes the tensors for its results as a last tuple, (*experts, logits); it returns the logits.
    Steps then have fewer and larger operators (`Blocks.fused`).
    rows: of one call at most; memory for activations is planned for as many.
    """
    decoder = _Decoder(config, format_of, act, rows, fused=captured)
    for entry in entries or tuple(ENTRIES):
        decoder.entry(entry, ENTRIES[entry])
    if captured:
        decoder.entry(CAPTURED, "step", flat=True)
    decoder.sampler()
    return Model(
        config,
        act,
        decoder.graph.builder.get(),
        decoder.graph.operators,
        decoder.parameters,
        decoder.states,
    )


@dataclass(frozen=True)
class _Built:
    """A block's function and the storage formats that it was built for."""

    function: Function
    formats: dict[str, WeightFormat]


class _Decoder:
    """Builds the entries; blocks are cached by kind, so layers of one kind share a function."""

    def __init__(
        self, config: ModelConfig, format_of: FormatOf, act: Activation, rows: int, fused: bool
    ) -> None:
        self.config, self.format_of, self.act = config, format_of, act
        self.fused = fused
        self.graph = Graph(rows)
        self.built: dict[str, list[_Built]] = {}
        self.parameters: tuple[Parameter, ...] = ()
        self.bank_entries = self._blocks("step").bank_entries
        self.layer_states = [self._states_of(i) for i in range(config.num_layers)]
        self.states = tuple(state for states in self.layer_states for state in states)

    def _blocks(self, form: Form, layer: int = 0) -> Blocks:
        return Blocks(
            self.config, self.graph, self.format_of, self.act, form, layer, fused=self.fused
        )

    def _states_of(self, layer: int) -> list[Arg]:
        """What one layer keeps between calls."""
        states = kda_states if self.config.layer_kinds[layer] == "kda" else mla_states
        return [replace(a, name=f"layers.{layer}.{a.name}") for a in states(self._blocks("step"))]

    # --- blocks ---------------------------------------------------------------------------------

    def block(self, form: Form, layer: int, half: str) -> Function:
        """The function of one half of a layer, built on first use for its kind and formats."""
        kind, body = self._body(form, layer, half)
        known = self.built.setdefault(kind, [])
        for b in known:
            if all(self._format(stem, layer) == fmt for stem, fmt in b.formats.items()):
                return b.function
        blocks = self._blocks(form, layer)
        name = kind + (f"_{len(known)}" if known else "")
        function = self.graph.function(
            name, lambda scope: body(blocks, declare_stream(blocks)), private=True
        )
        known.append(_Built(function, dict(blocks.formats)))
        return function

    def _format(self, stem: str, layer: int) -> WeightFormat:
        return self.format_of(stem.replace("{layer}", str(layer)).replace("{expert}", "0"))

    def _body(
        self, form: Form, layer: int, half: str
    ) -> tuple[str, Callable[[Blocks, Stream], Expr]]:
        """Name and builder of a block; the name holds everything that makes blocks differ."""
        if half == "ffn":
            kind = self.config.ffn_kind(layer)
            return kind, dense_block if kind == "dense" else moe_block
        kda, restart = self.config.layer_kinds[layer] == "kda", self.starts_block(layer)
        mixer = kda_mixer if kda else mla_mixer
        name = (f"kda_{form}" if kda else "mla") + ("_restart" if restart else "")
        return name, lambda blocks, stream: mixer(blocks, stream, restart)

    def starts_block(self, layer: int) -> bool:
        """Whether the stream enters the AttnRes bank at this layer and begins anew."""
        size = self.config.attn_res_block_size
        return bool(size) and layer % (size or 1) == 0

    def embed(self) -> Function:
        """ids -> stream."""
        blocks = self._blocks("step")
        c, stem = self.config, "model.embed_tokens"

        def body(scope: Scope) -> Expr:
            op = Embed(c.vocab_size, c.hidden_size, blocks.stored([stem]))
            ids = scope.input(Arg("ids", ("n",), "int32"))
            return self.graph.call(op, ids, *blocks.table(op, stem))

        return self._once("embed", body)

    def head(self, every_row: bool) -> Function:
        """stream -> logits: last mix and norm, the rows that are asked for, lm_head."""
        blocks = self._blocks("step")
        c = self.config

        def body(scope: Scope) -> Expr:
            stream = declare_stream(blocks)
            x = blocks.mix_and_norm(stream, "model.norm", "model.output_attn_res")
            if not every_row:
                last = self.graph.call(LastRows(c.hidden_size), x.tensor, stream.seqs)
                x = Slice(last, c.hidden_size)
                scope.symbols["n"] = scope.dim("m")  # from here on a row is a sequence
            return blocks.linear("head", c.vocab_size, c.hidden_size, x, "lm_head").tensor

        return self._once("head_every_row" if every_row else "head", body)

    def _once(self, name: str, body: Callable[[Scope], Expr]) -> Function:
        if name not in self.built:
            function = self.graph.function(name, body, private=True)
            self.built[name] = [_Built(function, {})]
        return self.built[name][0].function

    # --- entries --------------------------------------------------------------------------------

    def sampler(self) -> None:
        """Add the entry that draws tokens."""
        op = Sample(self.config.vocab_size)

        def body(scope: Scope) -> Expr:
            return self.graph.call(op, *(scope.input(a) for a in op.arguments()[:-1]))

        self.graph.function("sample", body, private=False)

    def entry(self, name: str, form: Form, flat: bool = False) -> None:
        """Add one entry function that calls the embedding, all layers and the head."""
        c = self.config
        embed, head = self.embed(), self.head(every_row=name == "logits")
        layers = [
            (i, half, self.block(form, i, half))
            for i in range(c.num_layers)
            for half in ("mixer", "ffn")
        ]
        weights = [p.placed("embed") for p in embed.weights]
        for i, half, function in layers:
            weights += [p.placed(f"layers.{i}.{half}", i) for p in function.weights]
        weights += [p.placed("head") for p in head.weights]
        self.parameters = tuple(weights)

        def body(scope: Scope) -> Expr:
            run = _Run(self, scope, one_row=form == "step", flat=flat)
            stream = run.embed(embed)
            for i, half, function in layers:
                stream = run.layer(i, half, function, stream)
            logits = run.call(head, stream, site=2 * c.num_layers, result=("linear", "out"))
            if run.flat:  # a graph must have a result that somebody takes
                return run.emit(
                    relax.call_pure_packed("vm.builtin.copy", logits, ty_args=logits.ty)
                )
            return run.emit(relax.Tuple([logits, relax.Tuple(run.routing)]))

        # a captured graph keeps the addresses of all that it was given
        attrs = {"num_input": 0} if flat else {}
        self.graph.function(name, body, private=False, attrs=attrs)


class _Run:
    """The body of an entry function: hands state and weights to the blocks in order."""

    def __init__(self, decoder: _Decoder, scope: Scope, one_row: bool, flat: bool) -> None:
        self.decoder, self.scope = decoder, scope
        self.emit, self.flat = decoder.graph.builder.emit, flat
        ids = Arg("ids", ("m" if one_row else "n",), "int32")
        if one_row:
            scope.symbols["n"] = scope.dim("m")  # as many rows as sequences
        self.ids, self.seqs, self.health = (scope.input(a) for a in (ids, SEQS, HEALTH))
        state_types = [scope.type_of(a) for a in decoder.states]
        weight_types = [scope.type_of(Arg(p.name, p.shape, p.dtype)) for p in decoder.parameters]
        self.states = self._items(self._tuple("states", state_types))
        self.weights = self._items(self._tuple("weights", weight_types))
        if flat:
            self.results = self._items(self._tuple("results", self._result_types()))
        self.bank = self._bank()
        self.count = 0
        self.routing: list[Expr] = []

    def _result_types(self) -> list[Any]:
        """The experts that each MoE layer chooses, then the logits: in the order of making."""
        c = self.decoder.config
        moe = [i for i in range(c.num_layers) if c.ffn_kind(i) == "moe"]
        experts = Arg("experts", ("m", c.experts_per_token), "int32")
        logits = Arg("logits", ("m", c.vocab_size))
        return [self.scope.type_of(a) for a in (*(experts for _ in moe), logits)]

    def _invoke(
        self, function: Function, arguments: list[Expr], result: tuple[str, str] | None = None
    ) -> Expr:
        """Call a function, or inline it; `result`: the output in it that is one of the entry's."""
        graph = self.decoder.graph
        if not self.flat:
            return graph.call_function(function, arguments)
        return graph.inline(function, arguments, {result: next(self.results)} if result else {})

    def _tuple(self, name: str, types: list[Any]) -> Expr:
        """Declare a tuple parameter."""
        var = relax.Var(name, relax.TupleType(types))
        self.scope.inputs.append(var)
        return var

    def _items(self, var: Expr) -> Iterator[Expr]:
        """The items of a tuple, to be taken one after the other."""
        return (self.emit(relax.TupleGetItem(var, i)) for i in range(len(var.ty.fields)))

    def _bank(self) -> list[Expr]:
        """Room for the AttnRes bank and the inverse RMS of its entries."""
        entries, width = self.decoder.bank_entries, self.decoder.config.hidden_size
        if not entries:
            return []
        n = self.scope.dim("n")
        shapes = ([entries, n, width], [entries, n])
        alloc = relax.op.builtin.alloc_tensor
        return [self.emit(alloc(relax.ShapeExpr(s), "float32", 0)) for s in shapes]

    def embed(self, function: Function) -> Expr:
        """The first value of the stream."""
        return self._invoke(function, [self.ids, *self._weights(function)])

    def _weights(self, function: Function) -> list[Expr]:
        return [next(self.weights) for _ in function.weights]

    def layer(self, i: int, half: str, function: Function, stream: Expr) -> Expr:
        """One half of a layer; the stream enters the bank when an AttnRes block begins."""
        c = self.decoder.config
        if half == "ffn":
            if c.ffn_kind(i) == "dense":
                return self.call(function, stream, 2 * i + 1)
            result = self.call(function, stream, 2 * i + 1, result=("router", "experts"))
            self.routing.append(self.emit(relax.TupleGetItem(result, 1)))
            return self.emit(relax.TupleGetItem(result, 0))
        states = [next(self.states) for _ in self.decoder.layer_states[i]]
        result = self.call(function, stream, 2 * i, states)
        if self.decoder.starts_block(i):
            push = BankPush(c.hidden_size, self.decoder.bank_entries, c.rms_norm_eps)
            self.decoder.graph.call(push, stream, *self.bank, scalars=[self.count])
            self.count += 1
        return result

    def call(
        self,
        function: Function,
        stream: Expr,
        site: int,
        states: Sequence[Expr] = (),
        result: tuple[str, str] | None = None,
    ) -> Expr:
        """Call a block: common inputs, states, weights."""
        where = [relax.prim_value(self.count), relax.prim_value(site)]
        common = [stream, *self.bank, self.seqs, self.health, *where]
        return self._invoke(function, [*common, *states, *self._weights(function)], result)
