"""Sequences side by side and over time: turns, slots, snapshots, causality (F1, F4 to F7)."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tvm.errors import DeviceError
from k3tvm.runtime.cpu import cores
from k3tvm.runtime.engine import Engine
from k3tvm.runtime.machine import set_threads
from tests.bundles import CONTEXT, SLOTS, Bundles
from tests.devices import TARGETS
from tests.tolerances import tolerance
from tests.truth import in_cuts, random_prompt

pytestmark = pytest.mark.usefixtures("one_thread")

PRESETS = ("k3-tiny", "kimi-linear-tiny")


@pytest.fixture(params=itertools.product(TARGETS, PRESETS), ids="-".join)
def engine(request: pytest.FixtureRequest, bundles: Bundles) -> Engine:
    target, preset = request.param
    return bundles.engine(preset, target=target)


class Solo:
    """One sequence alone in an engine of its own: what a slot among others must equal."""

    def __init__(self, folder_of: Engine) -> None:
        self.engine = Engine.open(folder_of.folder, slots=1)

    def prefill(self, ids: list[int]) -> np.ndarray:
        return self.engine.prefill(ids)

    def decode(self, token: int) -> np.ndarray:
        return self.engine.decode([token])[0]


def test_f5_slots_started_and_finished_at_different_times(engine: Engine) -> None:
    """Every number of every slot is that of its solo run, to the last bit."""
    solos = [Solo(engine) for _ in range(SLOTS)]
    tokens = iter(random_prompt(engine, 300, seed=1))

    def begin(slot: int, length: int) -> None:
        engine.reset(slot)
        solos[slot].engine.reset()
        ids = [next(tokens) for _ in range(length)]
        np.testing.assert_array_equal(engine.prefill(ids, slot), solos[slot].prefill(ids))

    def step(*slots: int) -> None:
        ids = [next(tokens) for _ in slots]
        got = engine.decode(ids, slots)
        for row, token, slot in zip(got, ids, slots, strict=True):
            np.testing.assert_array_equal(row, solos[slot].decode(token))

    begin(0, 5)
    begin(1, 17)
    for _ in range(4):
        step(0, 1)
    begin(2, 1)  # F4: a prompt of length 1 while others are under way
    for _ in range(5):
        step(0, 1, 2)
    begin(0, 3)  # finished, and another begins in its slot
    for _ in range(4):
        step(2, 0, 1)  # the order of the rows is not that of the slots
    step(1)
    begin(1, 66)
    for _ in range(3):
        step(0, 2)
        step(1, 2)


def test_f4_f5_one_call_with_prompts_of_length_1_2_and_more(engine: Engine) -> None:
    """The prefill entry takes several sequences at once; each picks its own state and rows."""
    counts, context = (1, 5, 2), 3
    ids = [random_prompt(engine, context + n, seed=n) for n in counts]
    for slot, tokens in enumerate(ids):
        engine.prefill(tokens[:context], slot)
    order, rows, first = (2, 0, 1), [], 0
    for slot in order:
        rows.append((slot, first, counts[slot], context))
        first += counts[slot]
    flat = np.array([t for slot in order for t in ids[slot][context:]], np.int32)
    got = engine._call("prefill", flat, rows)
    for row, slot in zip(got, order, strict=True):
        alone = Solo(engine)
        want = [alone.prefill(ids[slot][:context]), alone.prefill(ids[slot][context:])][1]
        np.testing.assert_allclose(row, want, rtol=0, atol=tolerance("batch") * np.abs(want).max())
        assert engine.position(slot) == context + counts[slot]


@pytest.mark.parametrize("slots", [5, 16])
def test_f5_many_slots_stay_apart(engine: Engine, slots: int) -> None:
    """From four rows on decode takes the kernels for many rows: equal up to rounding."""
    many = Engine.open(engine.folder, slots=slots)
    prompts = [random_prompt(engine, 1 + slot % 4, seed=slot) for slot in range(slots)]
    steps = [random_prompt(engine, 6, seed=100 + slot) for slot in range(slots)]
    for slot, ids in enumerate(prompts):
        many.prefill(ids, slot)
    got = [many.decode([s[t] for s in steps], range(slots)) for t in range(6)]
    for slot in range(0, slots, 3):
        engine.reset()
        engine.prefill(prompts[slot])
        want = np.stack([engine.decode([token])[0] for token in steps[slot]])
        error = np.abs(np.stack([g[slot] for g in got]) - want).max()
        assert error <= tolerance("batch") * np.abs(want).max()


@pytest.mark.parametrize("length", [9, 130])
def test_f6_later_tokens_leave_earlier_logits_alone(engine: Engine, length: int) -> None:
    """Bit for bit, with the change at chunk borders and elsewhere."""
    ids = random_prompt(engine, length, seed=2)
    other = [(i + 1) % engine.config.vocab_size for i in ids]
    before = in_cuts(engine, ids, [length]).logits
    for start in (p for p in (1, 2, 5, 8, 16, 31, 63, 64, 65, 100, 129) if p < length):
        after = in_cuts(engine, ids[:start] + other[start:], [length]).logits
        np.testing.assert_array_equal(after[:start], before[:start], err_msg=str(start))
        assert (after[start] != before[start]).any()


def count_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the tokens that reach the compiled code from now on."""
    seen: list[int] = []
    invoke = engine._invoke

    def counted(machine: Any, entry: str, tokens: np.ndarray, seqs: Any) -> Any:
        seen.append(len(tokens))
        return invoke(machine, entry, tokens, seqs)

    monkeypatch.setattr(engine, "_invoke", counted)
    return lambda: sum(seen)


def test_f1_f7_a_second_turn_reads_only_its_own_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn 2 after a rolled-back answer equals turn 2 from scratch and costs its new tokens."""
    first, answer, second = (random_prompt(engine, n, seed=n) for n in (37, 6, 11))
    engine.prefill(first)
    kept = engine.snapshot()
    for token in answer:
        engine.decode([token])
    engine.restore(kept)
    assert engine.position() == kept.position == 37
    evaluated = count_tokens(engine, monkeypatch)
    reused = engine.prefill(second)
    assert evaluated() == 11 and engine.position() == 48
    untouched = Solo(engine)
    untouched.prefill(first)
    np.testing.assert_array_equal(reused, untouched.prefill(second))
    want = Solo(engine).prefill(first + second)
    assert np.abs(reused - want).max() <= tolerance("batch") * np.abs(want).max()


def test_f1_a_snapshot_moves_to_another_slot_and_another_engine(engine: Engine) -> None:
    """It holds all of the state and nothing of the place; later use does not change it."""
    ids = random_prompt(engine, 40, seed=3)
    engine.prefill(ids[:20], slot=1)
    kept = engine.snapshot(1)
    want = engine.prefill(ids[20:], slot=1)
    other = Engine.open(engine.folder, slots=2, context=64)
    other.prefill(ids[5:30], slot=1)  # what is there is overwritten
    for target, slot in ((engine, 0), (engine, 1), (other, 1)):
        target.restore(kept, slot)
        assert target.position(slot) == 20
        np.testing.assert_array_equal(target.prefill(ids[20:], slot), want)
    assert kept.nbytes == sum(a.nbytes for a in kept.arrays) > 0


def test_f5_a_fork_goes_its_own_way(engine: Engine) -> None:
    ids = random_prompt(engine, 30, seed=4)
    engine.prefill(ids[:20])
    engine.fork(0, 2)
    left = [engine.decode([t], [0])[0] for t in ids[20:25]]
    right = [engine.decode([t], [2])[0] for t in ids[25:]]
    for tokens, got in ((ids[20:25], left), (ids[25:], right)):
        solo = Solo(engine)
        solo.prefill(ids[:20])
        np.testing.assert_array_equal(np.stack(got), np.stack([solo.decode(t) for t in tokens]))


def test_unusable_requests_are_refused_and_change_nothing(engine: Engine) -> None:
    """One line each, before any state moves."""
    vocab = engine.config.vocab_size
    engine.prefill([1, 2, 3])
    kept = engine.snapshot()
    long = Engine.open(engine.folder, slots=1, context=CONTEXT)
    long.prefill(random_prompt(engine, 100))
    short = Engine.open(engine.folder, slots=1, context=50)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("outside of the vocabulary", lambda: engine.prefill([vocab])),
        ("outside of the vocabulary", lambda: engine.decode([-1])),
        ("integers", lambda: engine.prefill(np.array([1.5]))),
        ("no tokens", lambda: engine.prefill([])),
        ("no tokens", lambda: engine.logits([])),
        ("do not fit the context", lambda: engine.prefill([1] * CONTEXT)),
        ("slot 3 does not exist", lambda: engine.prefill([1], slot=3)),
        ("one each is needed", lambda: engine.decode([1, 2], [0, 0])),
        ("one each is needed", lambda: engine.decode([1, 2], [0])),
        ("no tokens", lambda: engine.decode([], [])),
        ("chunk", lambda: engine.prefill([1, 2], chunk=0)),
        ("100 tokens", lambda: short.restore(long.snapshot())),
        ("not an integer", lambda: engine.decode([1], [0.0])),
        ("slots", lambda: Engine.open(engine.folder, slots=0)),
        ("fit into memory", lambda: Engine.open(engine.folder, slots=10**12)),
        ("fit into memory", lambda: Engine.open(engine.folder, slots=10**30)),
        ("context", lambda: Engine.open(engine.folder, context=-1)),
        ("positions", lambda: Engine.open(engine.folder, context=10**9)),
        ("threads", lambda: Engine.open(engine.folder, threads=0)),
    ]
    for words, call in calls:
        with pytest.raises(DeviceError, match=words):
            call()
    after = engine.snapshot()
    assert after.position == 3
    for a, b in zip(kept.arrays, after.arrays, strict=True):
        np.testing.assert_array_equal(a, b)


def test_calls_from_two_python_threads_wait_for_each_other(engine: Engine) -> None:
    """Without a lock this crashes or mixes the slots up. One kernel thread: pools would contend."""
    own = Engine.open(engine.folder, slots=2, context=CONTEXT, threads=1)
    ids = random_prompt(engine, 30)
    want = own.logits(ids)
    same: list[bool] = []

    def work(slot: int) -> None:
        for _ in range(20):
            own.reset(slot)
            same.append(bool((own.logits(ids, slot) == want).all()))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [0, 1]))
    set_threads(cores())
    assert len(same) == 40 and all(same)


def test_a_snapshot_of_another_model_is_refused(engine: Engine) -> None:
    engine.prefill([1, 2])
    kept = engine.snapshot()
    cut = tuple(a[..., :-1] for a in kept.arrays)
    for arrays in (kept.arrays[:-1], cut):
        with pytest.raises(DeviceError, match="another model"):
            engine.restore(replace(kept, arrays=arrays))


def test_a_full_slot_holds_exactly_its_context(engine: Engine) -> None:
    full = Engine.open(engine.folder, slots=1, context=20)
    ids = random_prompt(engine, 21, seed=5)
    np.testing.assert_array_equal(full.prefill(ids[:20]), engine.prefill(ids[:20]))
    with pytest.raises(DeviceError, match=r"20 \+ 1 tokens do not fit"):
        full.decode([ids[20]])


FORK = """
import os, sys
from k3tvm.errors import DeviceError
from k3tvm.runtime.engine import Engine
engine = Engine.open(sys.argv[1])
engine.prefill([1, 2])
child = os.fork()
if not child:
    for action in (lambda: engine.decode([1]), lambda: Engine.open(sys.argv[1])):
        try:
            action()
        except DeviceError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
engine.decode([3])
"""


def test_a_forked_process_is_told_and_ends(bundles: Bundles) -> None:
    """Kernel threads do not survive a fork: waiting for them would take for ever."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", FORK, str(bundles.bundle("k3-tiny"))]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
