"""What our code generators share: TVM calls them by name, with nothing but a module and a target.

What else they must know, the whole profile, where to dump, whom to tell, is set around the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import tvm
from k3tvm.errors import TargetError
from k3tvm.schedules.profile import GpuProfile

Progress = Callable[[str], None]


@dataclass
class Generation:
    """One call of TVM's build.

    profile: None where someone calls TVM without our compiler. dump: where sources are written.
    progress: told of every finished step, perhaps from several threads. kernels: what was built.
    """

    profile: GpuProfile | None = None
    dump: Path | None = None
    progress: Progress = lambda message: None
    kernels: list[Any] = field(default_factory=list)

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files into the dump, if there is one."""
        if self.dump is None:
            return
        try:
            self.dump.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                (self.dump / name).write_bytes(data)
        except OSError as error:  # TVM, which calls this, would make another error of it
            raise TargetError(f"cannot be written: {error}", where=f"dump {self.dump}") from None


_current: ContextVar[Generation | None] = ContextVar("generation", default=None)


def current() -> Generation:
    """The generation that is under way, or an empty one."""
    return _current.get() or Generation()


@contextmanager
def generating(generation: Generation) -> Iterator[None]:
    """Inside, generators work for `generation`."""
    token = _current.set(generation)
    try:
        yield
    finally:
        _current.reset(token)


def install(kind: str, build: Callable[[Any, Any], Any], *errors: type[Exception]) -> None:
    """Let TVM compile for `kind` with `build`; TargetError and `errors` keep their type."""
    tvms_own(kind)
    kept: tuple[type[Exception], ...] = (TargetError, *errors)
    for error in kept:
        tvm_ffi.register_error(error.__name__, error)
    tvm_ffi.register_global_func(_name(kind), build, override=True)


@cache
def tvms_own(kind: str) -> Any:
    """TVM's own generator, as it was before ours took its place; None where it has none."""
    return tvm.get_global_func(_name(kind), allow_missing=True)


@contextmanager
def replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, TVM's global function `name` is `function`."""
    before = tvm.get_global_func(name, allow_missing=True)
    tvm_ffi.register_global_func(name, function, override=True)
    try:
        yield
    finally:
        if before is None:
            tvm_ffi.registry.remove_global_func(name)
        else:
            tvm_ffi.register_global_func(name, before, override=True)


def _name(kind: str) -> str:
    return f"target.build.{kind}"
