"""Checkpoint to bundle: reads, plans, compiles, converts, and publishes with one rename."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from k3tvm._tvm import PINS, tvm
from k3tvm.bundle.manifest import (
    FILE,
    ArrayEntry,
    CodeEntry,
    FileEntry,
    KernelEntry,
    Manifest,
    StateEntry,
)
from k3tvm.bundle.params import FOLDER, ParamsWriter, Unit, sha256
from k3tvm.checkpoint.checkpoint import Checkpoint
from k3tvm.compiler import link
from k3tvm.compiler.alone import alone
from k3tvm.compiler.convert import pieces
from k3tvm.compiler.formats import formats_of
from k3tvm.compiler.lowering import generator
from k3tvm.compiler.pipeline import Compiled, compile_module
from k3tvm.compiler.plan import plan_units
from k3tvm.compiler.targets import profile_of, split_targets
from k3tvm.cuda.spills import allowing_spills
from k3tvm.errors import BundleError, CheckpointError, K3Error, TargetError
from k3tvm.relax_models.decoder import Model, build_model
from k3tvm.relax_models.graph import MAX_SEQUENCES
from k3tvm.relax_models.operators import Activation
from k3tvm.relax_models.parameters import Parameter
from k3tvm.schedules.profile import GpuProfile, TargetProfile

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Options:
    """How to compile. target: one or several names with commas, the first is the default device.
    slots: sequences at once; context: tokens per slot, 4096 or what the model allows when None.
    Both can be changed when the bundle is opened. allow_spills: patterns of names of CUDA kernels
    whose registers may be spilled.
    """

    target: str = "cpu"
    activations: Activation = "float32"
    context: int | None = None
    slots: int = 1
    weights: bool = True
    dump: Path | None = None
    allow_spills: tuple[str, ...] = ()


class Progress(Protocol):
    """Receives what the compiler is doing."""

    def step(self, message: str) -> None:
        """A new step has begun."""

    def total(self, nbytes: int) -> None:
        """So many bytes of parameters will be written."""

    def advance(self, nbytes: int) -> None:
        """So many more of them were written or found finished."""


class Silent:
    """A Progress that says nothing."""

    def step(self, message: str) -> None:
        """Nothing."""

    def total(self, nbytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """Nothing."""


def compile_checkpoint(
    path: Path, out: Path, options: Options, progress: Progress | None = None
) -> Manifest:
    """Compile the checkpoint at `path` into the bundle folder `out`.

    Everything is written into `out`.partial, which is renamed when complete: an interrupted run
    leaves `out` as it was and is resumed by the next one. An existing bundle at `out` is replaced;
    anything else there is refused. Raises ConfigError, CheckpointError, TargetError, BundleError.
    """
    say = progress or Silent()
    profiles = _profiles(options.target)
    say.step("reading the checkpoint")
    checkpoint = open_checkpoint(path, options.weights)
    out = out.resolve()
    partial = out.parent / f"{out.name}.partial"
    _check_output(out, partial)
    _check_tools(profiles)
    options = _with_context(options, checkpoint.config.max_position_embeddings)
    say.step("building the model")
    formats = formats_of(checkpoint)
    models = {
        form: build_model(
            checkpoint.config, formats, options.activations, captured=form[0], rows=form[1]
        )
        for form in {(p.captured, p.rows) for p in profiles}
    }
    compiled = [_compile(models[p.captured, p.rows], p, profiles, options, say) for p in profiles]
    model = next(iter(models.values()))  # they have the same parameters and states
    with alone(partial):
        try:
            manifest = _fill(partial, checkpoint, model, compiled, options, say)
        except K3Error:
            shutil.rmtree(partial)
            raise
        _publish(partial, out)
    return manifest


def _profiles(targets: str) -> list[TargetProfile]:
    """The profiles of names with commas between them."""
    profiles = [profile_of(name) for name in split_targets(targets)]
    if len({p.name for p in profiles}) != len(profiles):
        raise TargetError(f"target {targets!r}: one of them is named twice")
    return profiles


def _compile(
    model: Model,
    profile: TargetProfile,
    profiles: list[TargetProfile],
    options: Options,
    say: Progress,
) -> Compiled:
    """The model for one of the targets."""
    dump = options.dump
    if dump and len(profiles) > 1:
        dump = dump / _label(profile)
    with allowing_spills(options.allow_spills):
        return compile_module(model.module, model.operators, profile, dump, say.step)


def _label(profile: TargetProfile) -> str:
    return profile.name.replace(":", "-")


def open_checkpoint(path: Path, weights: bool) -> Checkpoint:
    """Open and check a checkpoint; with `weights` its shards must be there."""
    checkpoint = Checkpoint.open(path)
    checkpoint.check()
    if weights and not checkpoint.has_data:
        raise CheckpointError(
            "has no safetensors shards",
            where=str(path),
            cure="download them, or compile code only with --no-weights",
        )
    return checkpoint


def _check_output(out: Path, partial: Path) -> None:
    if out.exists() and not (out / FILE).is_file():
        raise BundleError(
            "exists and is not a bundle",
            where=str(out),
            cure="choose another folder with -o, or remove it",
        )
    if not out.parent.is_dir():
        raise BundleError(
            "is not a folder", where=str(out.parent), cure="create it, or choose another with -o"
        )
    if partial.exists() and not (partial.is_dir() and _is_ours(partial)):
        raise BundleError(
            "stands where the bundle is prepared, and is not of an interrupted run",
            where=str(partial),
            cure="move it away, or choose another folder with -o",
        )


def _check_tools(profiles: list[TargetProfile]) -> None:
    """Device code and linking come last; what they need is asked for first."""
    if tvm.support.cc.get_cc() is None:
        raise TargetError("no C++ compiler is found to link with", cure="install g++, or set CXX")
    for profile in profiles:
        if isinstance(profile, GpuProfile):
            generator(profile).check_tools(profile)


def _is_ours(partial: Path) -> bool:
    return {p.name for p in partial.iterdir()} <= {"code", FOLDER, FILE, f"{FILE}.part"}


def _with_context(options: Options, longest: int) -> Options:
    """The options with a context; BundleError when it cannot be."""
    context = min(DEFAULT_CONTEXT, longest) if options.context is None else options.context
    if context < 1 or options.slots < 1:
        raise BundleError("context and slots must be at least 1")
    if context > longest:
        raise BundleError(
            f"context {context} is more than the model's {longest} positions",
            cure=f"use --context {longest} or less",
        )
    return replace(options, context=context)


def _fill(
    folder: Path,
    checkpoint: Checkpoint,
    model: Model,
    compiled: list[Compiled],
    options: Options,
    say: Progress,
) -> Manifest:
    say.step("linking the library")
    code = _write_codes(folder, compiled)
    units = plan_units(model.parameters, model.config, checkpoint)
    files: tuple[FileEntry, ...] = ()
    if options.weights:
        say.step("converting parameters")
        files = _write_params(folder, checkpoint, model.parameters, units, say)
    elif (folder / FOLDER).exists():
        shutil.rmtree(folder / FOLDER)  # of an interrupted run with weights
    states = tuple(StateEntry(a.name, a.shape, a.dtype) for a in model.states)
    manifest = Manifest(
        config=asdict(model.config),
        activations=model.act,
        code=code,
        arrays=tuple(a for u in units for a in u.arrays),
        params=files,
        states=states,
        sites=model.sites,
        slots=options.slots,
        context=options.context or 0,
        source=checkpoint.path.name,
        versions=dict(PINS),
        has_weights=options.weights,
    )
    manifest.save(folder)
    return manifest


def _write_codes(folder: Path, compiled: list[Compiled]) -> tuple[CodeEntry, ...]:
    """One library per target, named after its kind where that is enough."""
    shutil.rmtree(folder / "code", ignore_errors=True)
    (folder / "code").mkdir()
    kinds = [c.profile.code_kind for c in compiled]
    names = [
        kind if kinds.count(kind) == 1 else _label(c.profile)
        for kind, c in zip(kinds, compiled, strict=True)
    ]
    return tuple(_write_code(folder, c, name) for c, name in zip(compiled, names, strict=True))


def _write_code(folder: Path, compiled: Compiled, name: str) -> CodeEntry:
    path = folder / "code" / link.file_name(compiled.profile, name)
    part = path.with_suffix(f".part{path.suffix}")
    link.link(compiled.executable, compiled.profile, part)
    part.rename(path)
    entry = FileEntry(f"code/{path.name}", path.stat().st_size, sha256(path))
    minima = compiled.minima
    kernels = tuple(
        KernelEntry(o.key, o.name, k.schedule, k.reason, minima.get(o.key, ()))
        for k in compiled.kernels
        for o in (k.operator,)
    )
    p = compiled.profile
    return CodeEntry(
        p.name,
        p.code_kind,
        p.mcpu,
        p.isa,
        entry,
        kernels,
        p.rows,
        MAX_SEQUENCES,
        compiled.device_kernels,
        p.captured,
        compiled.points,
    )


def _write_params(
    folder: Path,
    checkpoint: Checkpoint,
    parameters: tuple[Parameter, ...],
    units: list[Unit],
    say: Progress,
) -> tuple[FileEntry, ...]:
    by_name = {p.name: p for p in parameters}
    writer = ParamsWriter(folder)
    say.total(sum(u.nbytes for u in units))

    def pieces_of(array: ArrayEntry) -> Any:
        return pieces(checkpoint, by_name[array.name])

    files = []
    for unit in units:
        entry = writer.kept(unit)
        if entry:
            say.advance(unit.nbytes)
        files.append(entry or writer.write(unit, pieces_of, say.advance))
    writer.close(files)
    return tuple(files)


def _publish(partial: Path, out: Path) -> None:
    """Put the finished folder in place; an older bundle is removed only after that."""
    if not out.exists():
        partial.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f"{out.name}.old-", dir=out.parent))
    out.rename(aside / out.name)
    partial.rename(out)
    shutil.rmtree(aside)
