"""Prefill and decode speed of a bundle, beside the machine's own limits in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from k3tvm.bench.kernels import dispatches, kernel_table
from k3tvm.bench.peaks import read_peak, sgemm_peak
from k3tvm.bundle.manifest import ArrayEntry
from k3tvm.errors import DeviceError
from k3tvm.runtime.engine import Engine
from k3tvm.runtime.machine import threads_in_use
from k3tvm.schedules.layouts import ROWS


@dataclass(frozen=True)
class Plan:
    """What to measure: prompt tokens, decoded tokens, rounds (medians are taken)."""

    prompt: int = 512
    tokens: int = 64
    rounds: int = 3


def bench(engine: Engine, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure. Memory bandwidth of shared machines drifts, so every round takes the limits right
    beside the speeds, the better of before and after; shares are medians of the rounds' shares.
    """
    if engine.device.code.kind.endswith("-emulated"):
        raise DeviceError(
            "is emulated: its speed says nothing",
            where=f"device {engine.device.label}",
            cure="measure on a real device, or on --device cpu",
        )
    if engine.device.code.kind == "metal":
        raise DeviceError("Metal devices cannot be measured yet", where=engine.device.label)
    limits = Limits(engine)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, engine.config.vocab_size, plan.prompt)
    _warm_up(engine, prompt)
    rounds = []
    for i in range(plan.rounds):
        say(f"round {i + 1} of {plan.rounds}")
        rounds.append(_round(engine, plan, prompt, rng, limits))
    peak_memory, held_memory = limits.memory()
    say("timing kernels")
    kernels = kernel_table(engine, plan.prompt)
    copies = limits.copies()
    read = copies or median(r.read for r in rounds)
    for row in kernels:
        row["share_of_bandwidth"] = row["bytes"] and row["bytes"] / row["microseconds"] * 1e6 / read
    return {
        "device": engine.device.label,
        "threads": threads_in_use(),
        "target": engine.device.code.target,
        "machine": {
            "read_bytes_per_s": median(r.read for r in rounds),
            "copy_bytes_per_s": copies,
            "sgemm_flops": median(r.sgemm for r in rounds) if limits.on_cpu else None,
        },
        "prefill": _prefill_facts(engine, plan, rounds),
        "decode": _decode_facts(engine, plan, rounds),
        "memory": _memory_facts(engine, peak_memory, held_memory),
        "dispatches_per_token": dispatches(kernels),
        "kernels": kernels,
    }


class Limits:
    """What the engine's device can do at most; a GPU has no BLAS here to be compared with."""

    def __init__(self, engine: Engine) -> None:
        device = engine.device
        self.device_memory: Any = device.memory
        self.threads, self.on_cpu = threads_in_use(), device.code.kind == "cpu"
        self.target = device.code.target if self.on_cpu else f"{device.code.kind}:{device.index}"

    def memory(self) -> tuple[int, int]:
        """The most bytes that were in use, of the process or of a GPU's tensors; bytes held now.

        What a plug-in holds of a GPU's memory is more than tensors: blocks to cut from, and buffers
        for copies.
        """
        if self.on_cpu:
            return _resident(), _resident()
        stats = self.device_memory.stats()
        return stats["peak_bytes"], stats["block_bytes"]

    def read(self) -> float:
        """Bytes per second of reads."""
        return read_peak(self.target, self.threads)

    def copies(self) -> float | None:
        """Bytes per second, read and written, of a CUDA device's own copies; None elsewhere."""
        if not self.target.startswith("cuda:"):
            return None
        from k3tvm.bench.cuda_clock import Clock, copy_rate
        from k3tvm.cuda import runtime

        return copy_rate(Clock(runtime.load().library), self.device_memory)

    def sgemm(self) -> float:
        """Operations per second of single precision matrix products; infinite when unknown."""
        return sgemm_peak(self.threads) if self.on_cpu else float("inf")


@dataclass(frozen=True)
class Round:
    """One round: tokens per second, and the machine's limits beside them."""

    prefill: float
    decode: float
    read: float
    sgemm: float


def _round(engine: Engine, plan: Plan, prompt: Any, rng: Any, limits: Limits) -> Round:
    sgemm = limits.sgemm()
    prefill = _time_prefill(engine, prompt)
    sgemm = max(sgemm, limits.sgemm())
    read = limits.read()
    decode = _time_decode(engine, plan.tokens, rng)
    return Round(prefill, decode, max(read, limits.read()), sgemm)


def touched_bytes(engine: Engine) -> int:
    """Weight bytes that one decoded token must read, padding not counted."""
    return sum(a.touched for a in engine.manifest.arrays)


def prefill_flops(engine: Engine, tokens: int) -> int:
    """Operations (2 per weight and token) of the matrix products of one prefill.

    Only chosen experts count, and the head only for the last token: the prefill computes no other
    logits. Attention scores, recurrence and everything elementwise are not counted.
    """
    weights = {a.name: _weights(a) for a in engine.manifest.arrays}
    head = weights["head.head.weight"]
    return 2 * ((sum(weights.values()) - head) * tokens + head)


def _weights(array: ArrayEntry) -> int:
    """How many weights of a matrix one token meets; 0 for what is no matrix."""
    if not (array.recipe.endswith("rows") or array.recipe.startswith("absorb")):
        return 0
    if array.dtype == "uint8":
        return 0  # scales
    mxfp4 = array.dtype == "uint32" and array.shape[-1] == ROWS
    return array.touched * 2 if mxfp4 else array.touched // (4 if array.dtype == "float32" else 2)


def _warm_up(engine: Engine, prompt: Any) -> None:
    engine.reset()
    engine.prefill(prompt)
    engine.reset()  # the context may have no room for more than the prompt
    for token in prompt[:4]:
        engine.decode([int(token)])


def _time_prefill(engine: Engine, prompt: Any) -> float:
    """Tokens per second of one prompt into an empty slot."""
    engine.reset()
    start = time.perf_counter()
    engine.prefill(prompt)
    return len(prompt) / (time.perf_counter() - start)


def _time_decode(engine: Engine, tokens: int, rng: Any) -> float:
    """Tokens per second of decoding, one sequence, random ids (as routing would vary)."""
    ids = rng.integers(0, engine.config.vocab_size, tokens).tolist()
    start = time.perf_counter()
    for token in ids:
        engine.decode([token])
    return tokens / (time.perf_counter() - start)


def _prefill_facts(engine: Engine, plan: Plan, rounds: list[Round]) -> dict[str, Any]:
    per_token = prefill_flops(engine, plan.prompt) / plan.prompt
    rate = median(r.prefill for r in rounds)
    return {
        "prompt_tokens": plan.prompt,
        "tokens_per_s": rate,
        "flops": per_token * rate,
        "share_of_sgemm_peak": median(per_token * r.prefill / r.sgemm for r in rounds) or None,
    }


def _decode_facts(engine: Engine, plan: Plan, rounds: list[Round]) -> dict[str, Any]:
    touched = touched_bytes(engine)
    rate = median(r.decode for r in rounds)
    return {
        "tokens": plan.tokens,
        "tokens_per_s": rate,
        "bytes_per_token": touched,
        "bytes_per_s": touched * rate,
        "share_of_read_bandwidth": median(touched * r.decode / r.read for r in rounds),
    }


def _memory_facts(engine: Engine, peak: int, held: int) -> dict[str, Any]:
    return {
        "peak_bytes": peak,
        "held_bytes": held,
        "parameter_bytes": sum(a.nbytes for a in engine.manifest.arrays),
        "state_bytes": engine.states.nbytes,
    }


def _resident() -> int:
    """The most memory this process has had, in bytes (getrusage would begin with its parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
