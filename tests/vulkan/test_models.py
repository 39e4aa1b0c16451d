"""Whole models on a Vulkan device against the CPU bundle, and what only a device can get wrong.

Every preset, length, chunking and slot test of `test_model.py` and `test_slots.py` runs on Vulkan
as well; here are the comparisons between the two.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest

from k3tvm._ffi import tvm_ffi
from k3tvm.bundle.manifest import Manifest
from k3tvm.checkpoint.presets import PRESETS
from k3tvm.compare.metrics import agreement
from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.errors import DeviceError
from k3tvm.runtime.engine import Engine
from k3tvm.runtime.state import state_bytes
from k3tvm.schedules.sampling import kept_mass
from k3tvm.vulkan.devices import size
from tests.bundles import CONTEXT, Bundles
from tests.devices import require
from tests.tolerances import tolerance
from tests.truth import Run, Truth, by_steps, in_cuts, random_prompt

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [name for name in PRESETS if "tiny" in name]
TARGET = "vulkan:lavapipe"


def same_experts(a: Run, b: Run) -> bool:
    return all(np.array_equal(a.routing[i], b.routing[i]) for i in a.routing)


@pytest.mark.parametrize("preset", SMALL)
def test_f27_logits_are_those_of_the_cpu(bundles: Bundles, preset: str) -> None:
    """In one piece, in chunks and by steps; the seed is one for which no experts tie."""
    cpu, vulkan = bundles.engine(preset), bundles.engine(preset, target=TARGET)
    ids = random_prompt(cpu, 70, seed=8)
    for read in (
        lambda e: in_cuts(e, ids, [70]),
        lambda e: in_cuts(e, ids, [1, 2, 33, 34]),
        lambda e: by_steps(e, ids[:20]),
    ):
        ours, theirs = read(vulkan), read(cpu)
        assert same_experts(ours, theirs)
        nmse = agreement(ours.logits, theirs.logits).nmse
        assert nmse <= tolerance("devices"), nmse


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_activations_stay_within_twice_the_error_of_torch(
    bundles: Bundles, dtype: str
) -> None:
    engine = bundles.engine("k3-tiny", dtype, target=TARGET)
    truth = Truth(engine)
    ids = random_prompt(engine, 65, seed=7)
    for run in (in_cuts(engine, ids, [65]), in_cuts(engine, ids, [7] * 9 + [2])):
        assert truth.ratio([run], dtype) <= tolerance("model_ratio")
    assert truth.ratio([by_steps(engine, ids)], dtype) <= tolerance("model_ratio")


@pytest.fixture(scope="module")
def both(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One bundle with code for two kinds of device over one set of parameters."""
    require("vulkan")
    out = tmp_path_factory.mktemp("both") / "k3-tiny.bundle"
    options = Options(f"cpu,{TARGET}", slots=2, context=CONTEXT)
    compile_checkpoint(bundles.checkpoint("k3-tiny"), out, options)
    return out


def test_one_bundle_serves_two_kinds_of_device(both: Path) -> None:
    """The first target is the default; snapshots move between devices."""
    cpu, vulkan = Engine.open(both), Engine.open(both, device="vulkan")
    assert cpu.device.label == "cpu" and vulkan.device.label.startswith("vulkan:0 ")
    ids = random_prompt(cpu, 40, seed=9)
    cpu.prefill(ids)
    vulkan.prefill(ids[:7], slot=1)
    vulkan.restore(cpu.snapshot(), slot=1)
    assert vulkan.position(1) == 40
    ours, theirs = vulkan.decode([5], [1]), cpu.decode([5])
    assert agreement(ours, theirs).nmse <= tolerance("devices")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("vulkan:9", ["9", "is not there"]),
        ("vulkan:no such card", ["no such card", "is not there"]),
        ("cpu:1", ["there is one CPU"]),
        ("opencl", ["not known", "cpu, vulkan"]),
        ("", ["not known", "cpu, vulkan"]),
        ("VULKAN", ["not known", "cpu, vulkan"]),
        ("cpu,vulkan", ["not known", "cpu, vulkan"]),
        ("vulkan:", ["nothing stands after the colon"]),
        ("vulkan: ", ["nothing stands after the colon"]),
        ("cpu:", ["nothing stands after the colon"]),
        ("vulkan:-1", ["-1", "is not there"]),
    ],
)
def test_f26_a_device_that_is_absent_is_an_error(both: Path, device: str, words: list[str]) -> None:
    with pytest.raises(DeviceError) as caught:
        Engine.open(both, device=device)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_f26_a_bundle_without_code_for_the_device_is_an_error(bundles: Bundles) -> None:
    with pytest.raises(DeviceError, match="has no code for vulkan, only for cpu"):
        Engine.open(bundles.bundle("k3-tiny"), device="vulkan")
    require("vulkan")
    with pytest.raises(DeviceError, match="has no code for cpu, only for vulkan-lavapipe"):
        Engine.open(bundles.bundle("k3-tiny", target=TARGET), device="cpu")


def test_f25_a_device_below_what_the_kernels_need_is_refused_at_load(both: Path) -> None:
    manifest = Manifest.load(both)
    cpu, code = manifest.code
    greedy = dataclasses.replace(code.device_kernels[0], shared_bytes=1 << 20)
    changed = dataclasses.replace(code, device_kernels=(greedy, *code.device_kernels[1:]))
    dataclasses.replace(manifest, code=(cpu, changed)).save(both)
    try:
        with pytest.raises(DeviceError, match="of shared memory more: needs 1 MiB, has 32 KiB"):
            Engine.open(both, device="vulkan")
    finally:
        manifest.save(both)


def test_f29_what_does_not_fit_is_refused_with_what_is_needed_and_what_is_left(both: Path) -> None:
    """Before anything is copied; the limit is kept to by the buffers for copies as well."""
    Engine.open(both, device="vulkan")  # has the plug-in loaded
    gc.collect()
    stats = tvm_ffi.get_global_func("k3tvm.vulkan.stats")
    limit = tvm_ffi.get_global_func("k3tvm.vulkan.set_memory_limit")
    before = json.loads(stats(0))
    limit(0, before["block_bytes"] + (1 << 20))
    try:
        with pytest.raises(DeviceError) as caught:
            Engine.open(both, device="vulkan", slots=500, context=4096)
    finally:
        limit(0, 0)
    said = re.search(
        r"parameters \((\S+ MiB)\) and state \((\S+ GiB) for 500 slots with context 4096",
        str(caught.value),
    )
    assert said and "fewer slots" in caught.value.cure and "MiB are left" in str(caught.value)
    manifest = Manifest.load(both)
    assert said[1] == size(sum(a.nbytes for a in manifest.arrays))
    assert said[2] == size(state_bytes(manifest.states, 500, 4096))
    assert json.loads(stats(0))["used_bytes"] == before["used_bytes"]


def test_f5_slots_of_a_device_do_not_leak(bundles: Bundles) -> None:
    """Neighbours decode while one slot is reset, restored and forked on the device."""
    engine = bundles.engine("k3-tiny", target=TARGET)
    alone = bundles.engine("k3-tiny", target=TARGET, slots=1)
    prompts = [random_prompt(engine, n, seed=n) for n in (30, 9, 17)]
    for slot, prompt in enumerate(prompts):
        engine.prefill(prompt, slot)
    saved = engine.snapshot(1)
    engine.decode([3, 4], [1, 2])
    engine.restore(saved, 1)
    engine.fork(1, 2)
    engine.reset(0)
    engine.prefill(prompts[2], 0)
    got = engine.decode([7, 8, 8], [0, 1, 2])
    np.testing.assert_array_equal(got[1], got[2])
    alone.prefill(prompts[2])
    np.testing.assert_array_equal(got[0], alone.decode([7])[0])


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_tokens_are_drawn_on_the_device(both: Path, device: str) -> None:
    """Greedy and by chance, two rows at once; the reference draws from the same logits."""
    engine = Engine.open(both, device=device)
    ids = random_prompt(engine, 6, seed=3)
    engine.prefill(ids[:3], 0)
    engine.prefill(ids[3:], 1)
    logits = engine.decode([7, 8], [0, 1])
    assert engine.sample([(0, 0, 1, 0)] * 2) == logits.argmax(1).tolist()
    mass = [kept_mass(row, 0.8, 0.9, 40) for row in logits]
    token = [int(m.argmax()) for m in mass]
    middle = [(m[:t].sum() + m[t] / 2) / m.sum() for m, t in zip(mass, token, strict=True)]
    assert engine.sample([(0.8, 40, 0.9, float(u)) for u in middle]) == token
    with pytest.raises(DeviceError, match="1 choices: one for each row"):
        engine.sample([(0, 0, 1, 0)])
    for wrong in ((-1, 0, 1, 0), (np.inf, 0, 1, 0), (1, -1, 1, 0), (1, 0, 0, 0), (1, 0, 1, 1)):
        with pytest.raises(DeviceError, match="cannot be drawn from"):
            engine.sample([wrong, (0, 0, 1, 0)])
