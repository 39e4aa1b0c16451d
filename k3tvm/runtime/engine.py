"""Runs a bundle: prefill, decode, logits of all positions, and state that can be copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from k3tvm._ffi import PINS
from k3tvm.bundle.manifest import Manifest, damaged
from k3tvm.bundle.params import check_file, check_files, map_arrays
from k3tvm.errors import BundleError, DeviceError
from k3tvm.relax_models.config import ModelConfig
from k3tvm.runtime.cpu import cores
from k3tvm.runtime.device import Device, open_device
from k3tvm.runtime.health import BadLogits, first_place
from k3tvm.runtime.machine import Machine, check_process, set_threads
from k3tvm.runtime.memory import Inbox, as_tuple
from k3tvm.runtime.state import Snapshot, States, state_bytes
from k3tvm.vulkan.devices import size

Array = np.ndarray[Any, Any]
Choice = tuple[float, int, float, float]  # temperature, top_k, top_p, u
CAPTURED = "decode_captured"
Sequence4 = tuple[int, int, int, int]  # slot, first row, rows, position (operators.SEQS)


class Engine:
    """An opened bundle with room for `slots` sequences of up to `context` tokens each.

    ids are integers in [0, vocab). Logits are float32 arrays. A slot remembers what it has read:
    `prefill` and `decode` continue it, `reset` begins anew. Calls from several Python threads wait
    for each other (one thread is faster: each has its own kernel workers, which contend); a slot
    belongs to one of them at a time. An engine does not survive os.fork.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, device: Device, slots: int, context: int
    ) -> None:
        self.folder, self.manifest, self.device = folder, manifest, device
        self.config = _config(folder, manifest)
        self.arrays = map_arrays(folder, manifest.arrays)
        memory = device.memory
        _check_memory(manifest, device, slots, context)
        self._weights = as_tuple([memory.put(a) for a in self.arrays])
        self.states = States(manifest.states, slots, context, memory)
        self._states = as_tuple([s.block.tensor for s in self.states.all])
        self._flags = memory.block((manifest.sites, slots), "int32")
        self._ids, self._rows = Inbox(memory, ()), Inbox(memory, (4,))
        self._kept: dict[int, Any] = {}
        self._experts: Any = ()
        self._logits: Any = None
        self._turn = RLock()  # the virtual machine and its inboxes serve one call at a time
        self.machine = self.new_machine()

    def new_machine(self) -> Machine:
        """Another virtual machine with the bundle's code for this device."""
        return Machine(self.folder / self.device.code.file.path, self.device)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        slots: int | None = None,
        context: int | None = None,
        threads: int | None = None,
        check: bool = True,
        device: str | None = None,
    ) -> Engine:
        """Open a bundle folder.

        slots, context: override what the bundle was compiled with. threads: of the CPU's kernels
        (default: all cores). check: verify the hash of parameter files, not only their size.
        device: "cpu", "vulkan", "vulkan:1", "vulkan:NAME" (default: what the bundle was compiled
        for first). Raises BundleError for a damaged or foreign bundle, DeviceError for a device
        that is absent or cannot run it; never takes another device than the one asked for.
        """
        check_process()
        folder = Path(folder)
        manifest = Manifest.load(folder)
        _check_versions(folder, manifest)
        manifest.check_seal(folder)
        opened = open_device(folder, manifest, device)
        if not manifest.has_weights:
            raise BundleError(
                "was compiled with --no-weights and cannot be run",
                where=str(folder),
                cure="compile it again without --no-weights",
            )
        check_file(folder, opened.code.file, content=True)
        check_files(folder, manifest.params, content=check)
        # TVM's own default takes every second core for a hyper-thread, whether it is one or not
        set_threads(cores() if threads is None else threads)
        slots = manifest.slots if slots is None else slots
        context = manifest.context if context is None else context
        _check_room(slots, context, _config(folder, manifest).max_position_embeddings)
        return cls(folder, manifest, opened, slots, context)

    # --- computing ------------------------------------------------------------------------------

    def prefill(self, ids: Sequence[int] | Array, slot: int = 0, chunk: int | None = None) -> Array:
        """Read tokens into a slot; logits [vocab] after the last one."""
        for part in self._chunks(ids, slot, chunk):
            logits = self._call("prefill", part, self._one(slot, part))
        return logits[0]

    def logits(self, ids: Sequence[int] | Array, slot: int = 0, chunk: int | None = None) -> Array:
        """Read tokens into a slot; logits [n, vocab] after each of them."""
        return self.logits_and_routing(ids, slot, chunk)[0]

    def logits_and_routing(
        self, ids: Sequence[int] | Array, slot: int = 0, chunk: int | None = None
    ) -> tuple[Array, dict[int, Array]]:
        """The same, and the experts [n, k] that each MoE layer chose, by layer (from 0)."""
        rows, routing = [], []
        for part in self._chunks(ids, slot, chunk):
            with self._turn:
                rows.append(self._call("logits", part, self._one(slot, part)))
                routing.append(self.routing())
        return np.concatenate(rows), joined(routing)

    def routing(self) -> dict[int, Array]:
        """The experts [n, k] that each MoE layer (by number, from 0) chose in the last call."""
        moe = [i for i in range(self.config.num_layers) if self.config.ffn_kind(i) == "moe"]
        experts = [self.device.memory.get(e).copy() for e in self._experts]
        return dict(zip(moe, experts, strict=True))

    def decode(self, ids: Sequence[int] | Array, slots: Sequence[int] = (0,)) -> Array:
        """Read one token into each of several slots; logits [len(slots), vocab]."""
        if len(ids) != len(slots) or len(set(slots)) != len(slots):
            raise DeviceError(f"{len(ids)} ids for slots {list(slots)}: one each is needed")
        if not len(ids):
            raise DeviceError("there are no tokens to read", cure="give at least one id")
        for token, slot in zip(ids, slots, strict=True):
            self._tokens([token], slot)
        if len(slots) > self.device.code.max_sequences:
            most = self.device.code.max_sequences
            raise DeviceError(f"{len(slots)} slots: at most {most} at once")
        seqs = [(s, row, 1, self.states.positions[s]) for row, s in enumerate(slots)]
        entry = CAPTURED if self.device.code.captured else "decode"
        return self._call(entry, np.asarray(ids, np.int32), seqs)

    def sample(self, choices: Sequence[Choice]) -> list[int]:
        """Draw a token from each row of the last call's logits, on the device (operators.Sample).

        One choice per row: (temperature, top_k, top_p, u) with u uniform in [0, 1).
        """
        if self._logits is None or len(choices) != self._logits.shape[0]:
            raise DeviceError(f"{len(choices)} choices: one for each row of logits is needed")
        for choice in choices:
            _check_choice(*choice)
        memory = self.device.memory
        controls = memory.block((len(choices), 4), "float32")
        top_k = memory.block((len(choices),), "int32")
        controls.write(0, np.array([(t, p, u, 0) for t, _, p, u in choices], np.float32))
        top_k.write(0, np.array([k for _, k, _, _ in choices], np.int32))
        with self._turn:
            ids = self.machine["sample"](self._logits, controls.tensor, top_k.tensor)
            return [int(i) for i in memory.get(ids)]

    def _call(self, entry: str, tokens: Array, seqs: list[Sequence4]) -> Array:
        """Run an entry over rows; its logits. The experts are kept for `routing`."""
        check_process()
        with self._turn:
            # flags of an earlier call whose logits were finite would name a wrong place
            self._flags.clear(0, self.manifest.sites * self.states.slots)
            self._logits, self._experts = self._invoke(self.machine, entry, tokens, seqs)
            logits = self.device.memory.get(self._logits)
            for slot, _, count, _ in seqs:
                self.states.positions[slot] += count
            if not np.isfinite(logits).all():
                self._fail(logits, seqs)
        return logits

    def _invoke(self, machine: Machine, entry: str, tokens: Array, seqs: list[Sequence4]) -> Any:
        """Logits and experts, on the device."""
        ids, rows = self._ids.put(tokens), self._rows.put(seqs)
        inputs = (ids, rows, self._flags.tensor, self._states, self._weights)
        if entry != CAPTURED:
            return machine[entry](*inputs)
        results = self._results(len(seqs))
        logits = machine[entry](*inputs, results)
        return logits, list(results)[:-1]

    def _results(self, rows: int) -> Any:
        """The tensors for the results of a captured step; a graph writes where it first did."""
        if rows not in self._kept:
            c, memory = self.config, self.device.memory
            moe = [i for i in range(c.num_layers) if c.ffn_kind(i) == "moe"]
            experts = [memory.block((rows, c.experts_per_token), "int32") for _ in moe]
            blocks = [*experts, memory.block((rows, c.vocab_size), "float32")]
            self._kept[rows] = blocks, as_tuple([b.tensor for b in blocks])
        return self._kept[rows][1]

    def run_on(self, machine: Machine, entry: str, tokens: Array) -> None:
        """Run an entry on slot 0 by another machine (one that is watched)."""
        self._invoke(machine, entry, tokens, self._one(0, tokens))

    def _one(self, slot: int, tokens: Array) -> list[Sequence4]:
        """The rows of a call that continues one slot."""
        return [(slot, 0, len(tokens), self.states.positions[slot])]

    def _fail(self, logits: Array, seqs: list[Sequence4]) -> None:
        """Reset the slots whose logits are not finite and raise BadLogits."""
        bad = []
        for i, (slot, first, count, _) in enumerate(seqs):
            rows = logits[i : i + 1] if len(logits) == len(seqs) else logits[first : first + count]
            if not np.isfinite(rows).all():
                bad.append(slot)
        place = first_place(self.health(), bad[0])
        for slot in bad:
            self.states.reset(slot)
        raise BadLogits(place, tuple(bad), logits)

    def health(self) -> Array:
        """The flags [sites, slots] that the norms raised in the last call."""
        sites, slots = self.manifest.sites, self.states.slots
        return self._flags.read(0, sites * slots).reshape(sites, slots)

    def _chunks(self, ids: Sequence[int] | Array, slot: int, chunk: int | None) -> list[Array]:
        """The checked tokens of one request, `chunk` at a time; at least one token."""
        most = self.device.code.max_rows
        chunk = most if chunk is None else min(chunk, most)
        tokens = self._tokens(ids, slot)
        if chunk < 1:
            raise DeviceError(f"chunk {chunk}: must be at least 1")
        if not len(tokens):
            raise DeviceError("there are no tokens to read", cure="give at least one id")
        return [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]

    def _tokens(self, ids: Sequence[int] | Array, slot: int) -> Array:
        """Check ids and room; int32 [n]."""
        used = self.states.positions[self.states.check(slot)]
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise DeviceError("ids must be a list of integers")
        vocab = self.config.vocab_size
        wrong = tokens[(tokens < 0) | (tokens >= vocab)]
        if wrong.size:
            raise DeviceError(f"id {wrong[0]} is outside of the vocabulary (0 to {vocab - 1})")
        if used + len(tokens) > self.states.context:
            raise DeviceError(
                f"{used} + {len(tokens)} tokens do not fit the context of {self.states.context}",
                cure="open the bundle with a larger context (--context)",
            )
        return tokens.astype(np.int32)

    # --- state ----------------------------------------------------------------------------------

    def position(self, slot: int = 0) -> int:
        """Tokens that a slot has read."""
        return self.states.positions[self.states.check(slot)]

    def reset(self, slot: int = 0) -> None:
        """Begin a new sequence in a slot."""
        self.states.reset(slot)

    def snapshot(self, slot: int = 0) -> Snapshot:
        """A copy of a slot's state, to go back to."""
        return self.states.snapshot(slot)

    def restore(self, snapshot: Snapshot, slot: int = 0) -> None:
        """Put a slot back to a snapshot."""
        self.states.restore(slot, snapshot)

    def fork(self, source: int, target: int) -> None:
        """Make slot `target` an independent copy of slot `source`."""
        self.states.fork(source, target)


def _check_choice(temperature: float, top_k: int, top_p: float, u: float) -> None:
    largest = float(np.finfo(np.float32).max)
    if not (0 <= temperature <= largest and top_k >= 0 and 0 < top_p <= 1 and 0 <= u < 1):
        raise DeviceError(
            f"temperature {temperature}, top-k {top_k}, top-p {top_p}, u {u}: cannot be drawn from",
            cure="temperature and top-k are 0 or more, top-p above 0 and at most 1, u below 1",
        )


def joined(routing: Sequence[dict[int, Array]]) -> dict[int, Array]:
    """The routing of calls that followed each other, as that of one call."""
    return {i: np.concatenate([r[i] for r in routing]) for i in routing[0]}


def _config(folder: Path, manifest: Manifest) -> ModelConfig:
    """JSON has no tuples; the configuration has no lists."""
    items = manifest.config.items()
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in items}
    try:
        return ModelConfig(**values)
    except TypeError as error:
        raise damaged(folder, f"config: {error}") from None


def _check_versions(folder: Path, manifest: Manifest) -> None:
    for package, present in PINS.items():
        wanted = manifest.versions.get(package, "an unknown version")
        if present != wanted:
            raise BundleError(
                f"was compiled with {package} {wanted}, this is {present}",
                where=str(folder),
                cure="compile the checkpoint again with this k3tvm",
            )


def _check_memory(manifest: Manifest, device: Device, slots: int, context: int) -> None:
    """Refuse before anything is copied what will not fit, with both numbers (F29)."""
    room = device.memory.room()
    if room is None:
        return
    weights = sum(a.nbytes for a in manifest.arrays)
    state = state_bytes(manifest.states, slots, context)
    if weights + state > room:
        raise DeviceError(
            f"parameters ({size(weights)}) and state ({size(state)} for {slots} slots with context"
            f" {context}) do not fit into memory: {size(room)} are left",
            where=device.label,
            cure="use fewer slots or a smaller context"
            if weights < room
            else "close what else uses it, or choose a device with more",
        )


def _check_room(slots: int, context: int, longest: int) -> None:
    if slots < 1 or context < 1:
        raise DeviceError(f"{slots} slots, context {context}: both must be at least 1")
    if context > longest:
        raise DeviceError(
            f"context {context} is more than the model's {longest} positions",
            cure=f"use {longest} or less",
        )
