"""Prefill and decode speed of a bundle, beside the machine's own limits in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from k3tvm.bench.peaks import read_peak, sgemm_peak
from k3tvm.bundle.manifest import ArrayEntry
from k3tvm.runtime.engine import Engine
from k3tvm.runtime.machine import Machine, threads_in_use
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
    threads, target = threads_in_use(), engine.manifest.code[0].target
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, engine.config.vocab_size, plan.prompt)
    _warm_up(engine, prompt)
    rounds = []
    for i in range(plan.rounds):
        say(f"round {i + 1} of {plan.rounds}")
        rounds.append(_round(engine, plan, prompt, rng, target, threads))
    peak_memory = _resident()
    say("timing kernels")
    return {
        "threads": threads,
        "target": target,
        "machine": {
            "read_bytes_per_s": median(r.read for r in rounds),
            "sgemm_flops": median(r.sgemm for r in rounds),
        },
        "prefill": _prefill_facts(engine, plan, rounds),
        "decode": _decode_facts(engine, plan, rounds),
        "memory": _memory_facts(engine, peak_memory),
        "kernels": kernel_table(engine, plan.prompt),
    }


@dataclass(frozen=True)
class Round:
    """One round: tokens per second, and the machine's limits beside them."""

    prefill: float
    decode: float
    read: float
    sgemm: float


def _round(engine: Engine, plan: Plan, prompt: Any, rng: Any, target: str, threads: int) -> Round:
    sgemm = sgemm_peak(threads)
    prefill = _time_prefill(engine, prompt)
    sgemm = max(sgemm, sgemm_peak(threads))
    read = read_peak(target, threads)
    decode = _time_decode(engine, plan.tokens, rng)
    return Round(prefill, decode, max(read, read_peak(target, threads)), sgemm)


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
        "share_of_sgemm_peak": median(per_token * r.prefill / r.sgemm for r in rounds),
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


def _memory_facts(engine: Engine, peak: int) -> dict[str, Any]:
    return {
        "peak_bytes": peak,
        "parameter_bytes": sum(a.nbytes for a in engine.manifest.arrays),
        "state_bytes": engine.states.nbytes,
    }


def _resident() -> int:
    """The most memory this process has had, in bytes (getrusage would begin with its parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def kernel_table(engine: Engine, prompt: int) -> list[dict[str, Any]]:
    """Time of every kernel in a decode step and in a prefill, longest first.

    Each row: entry, kernel, calls per run, microseconds per run of all calls together (medians
    over several runs). Watching costs time between kernels, not inside them.
    """
    rows = []
    machine = Machine(engine.folder / engine.manifest.code[0].file.path)
    stopwatch = _Stopwatch()
    machine.instrument(stopwatch)
    rng = np.random.default_rng(0)
    rows_at_once = min(prompt, engine.manifest.max_rows)
    for entry, tokens, runs in (("decode", 1, 16), ("prefill", rows_at_once, 3)):
        engine.reset()
        for _ in range(runs):
            stopwatch.begin()
            ids = rng.integers(0, engine.config.vocab_size, tokens).astype(np.int32)
            engine.run_on(machine, entry, ids)
        rows += stopwatch.rows(entry)
    engine.reset()
    return rows


class _Stopwatch:
    """Called by the virtual machine before and after every call; adds up kernel times by name."""

    def __init__(self) -> None:
        self.runs: list[dict[str, list[float]]] = []
        self.start = 0.0

    def begin(self) -> None:
        """A new run begins."""
        self.runs.append({})

    def __call__(self, function: Any, name: str, before: bool, result: Any, *args: Any) -> None:
        if before:
            self.start = time.perf_counter()
        elif not name.startswith("vm.builtin"):
            self.runs[-1].setdefault(name, []).append(time.perf_counter() - self.start)

    def rows(self, entry: str) -> list[dict[str, Any]]:
        """Medians over the runs so far, which are then forgotten."""
        runs, self.runs = self.runs, []
        rows: list[dict[str, Any]] = [
            {
                "entry": entry,
                "kernel": name,
                "calls": len(calls),
                "microseconds": median(sum(run[name]) for run in runs) * 1e6,
            }
            for name, calls in runs[0].items()
        ]
        return sorted(rows, key=lambda row: -float(row["microseconds"]))
