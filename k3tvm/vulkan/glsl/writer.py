"""What the translation of one kernel collects: lines, names, buffers, declarations, proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from k3tvm._tvm import tvm
from k3tvm.vulkan.glsl.lanes import Splitter
from k3tvm.vulkan.glsl.names import Names
from k3tvm.vulkan.glsl.types import DType, UnsupportedError

Space = Literal["global", "shared", "local", "variable"]


@dataclass(frozen=True)
class Memory:
    """Where a TIR buffer lives in GLSL.

    space: device memory behind an address, an array shared by the workgroup, an array of one
    thread, or (one element) a plain variable. name: its GLSL name. dtype: of one element. access:
    qualifiers of the address. holder: the dtype that the address variable itself points to.
    elements: how many elements there are if that is known.
    """

    space: Space
    name: str
    dtype: DType
    access: str = ""
    holder: DType | None = None
    elements: int | None = None


@dataclass
class Writer:
    """The state of one translation.

    used: variables that some expression reads. device_barrier: barriers order device memory too.
    """

    names: Names = field(default_factory=Names)
    lines: list[str] = field(default_factory=list)
    indent: int = 1
    memory: dict[Any, Memory] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    helpers: dict[tuple[str, DType], None] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)
    matrices: dict[str, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    shared_bytes: int = 0
    local_size: dict[str, int] = field(default_factory=lambda: dict.fromkeys("xyz", 1))
    grid: dict[str, int] = field(default_factory=lambda: dict.fromkeys("xyz", 1))
    used: set[Any] = field(default_factory=set)
    splitter: Splitter = field(default_factory=Splitter)
    device_barrier: bool = False
    analyzer: Any = field(default_factory=lambda: tvm.sym.Analyzer())
    _guards: int = 0
    _known: dict[Any, Any] = field(default_factory=dict)

    def memory_of(self, buffer: Any) -> Memory:
        """Where a buffer lives; UnsupportedError if nothing declared it."""
        if buffer not in self.memory:
            raise UnsupportedError(f"the buffer {buffer.name} was not declared")
        return self.memory[buffer]

    def line(self, text: str) -> None:
        """Write one line at the current depth."""
        self.lines.append("  " * self.indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Braces around what is written inside."""
        self.line(f"{head} {{")
        self.indent += 1
        with self.unguarded():
            yield
        self.indent -= 1
        self.line("}")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, expressions are only evaluated if a condition holds: no loads may move out."""
        self._guards += 1
        yield
        self._guards -= 1

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Inside, statements begin afresh."""
        guards, self._guards = self._guards, 0
        yield
        self._guards = guards

    @property
    def is_guarded(self) -> bool:
        """Whether the expression at hand is evaluated only sometimes."""
        return self._guards > 0

    def hoist(self, kind: DType, text: str, name: str = "t") -> str:
        """Put a value into a variable before the statement at hand and return its name."""
        fresh = self.names.fresh(name)
        self.line(f"{kind.glsl} {fresh} = {bare(text)};")
        return fresh

    def reference(self, kind: DType, access: str = "") -> str:
        """The buffer reference type through which `kind` is read and written at an address."""
        stored = kind.stored
        prefix = "In" if "readonly" in access else "At" if "coherent" in access else "R"
        name = f"{prefix}_{stored}"
        align = stored.size if stored.lanes != 3 else stored.scalar.size
        head = f"layout(buffer_reference, scalar, buffer_reference_align = {align})"
        qualifiers = f"{access} " if access else ""
        self.references[name] = f"{head} {qualifiers}buffer {name} {{ {stored.glsl} d[]; }};"
        return name

    def helper(self, name: str, kind: DType) -> str:
        """Ask for a function of `library.py` on this type and return its name."""
        self.helpers[(name, kind)] = None
        return name

    def know(self, variable: Any, value: Any) -> None:
        """Let proofs use the value, or range of values, of a variable."""
        again = variable in self._known
        self._known[variable] = value
        if again:  # another loop with the same variable: what was known does not hold any more
            self.analyzer = tvm.sym.Analyzer()
        for known, what in self._known.items() if again else ((variable, value),):
            self.analyzer.bind(known, what)

    def proves(self, claim: Callable[[], Any]) -> bool:
        """Whether a boolean TIR expression holds for every thread and iteration."""
        try:
            return bool(self.analyzer.can_prove(claim()))
        except (TypeError, ValueError, tvm.error.InternalError):
            return False


def bare(text: str) -> str:
    """The text without parentheses around all of it, for places that need none."""
    if not text.startswith("(") or not text.endswith(")"):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


Emitter = Callable[[Writer, Any], str]
EXPRESSIONS: dict[str, Emitter] = {}


def emits(*kinds: str) -> Callable[[Emitter], Emitter]:
    """Register a function as the translation of these kinds of TIR expression."""

    def enter(function: Emitter) -> Emitter:
        EXPRESSIONS.update(dict.fromkeys(kinds, function))
        return function

    return enter


def expression(w: Writer, node: Any) -> str:
    """The GLSL text of a TIR expression; safe as an operand."""
    kind = type(node).__name__
    if kind not in EXPRESSIONS:
        raise UnsupportedError(f"no GLSL for expressions of kind {kind}")
    return EXPRESSIONS[kind](w, node)
