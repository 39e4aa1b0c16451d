"""Bundles: round trip, interrupted conversion (F21), damage and other versions (F28), atomicity."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from k3tvm.bundle.params import ParamsWriter, sha256
from k3tvm.checkpoint import Checkpoint
from k3tvm.compare.restore import BundleTensors
from k3tvm.compiler import compile as compiler
from k3tvm.compiler.alone import alone
from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.compiler.pipeline import Compiled
from k3tvm.errors import BundleError, CheckpointError, DeviceError, TargetError
from k3tvm.runtime import device as device_module
from k3tvm.runtime.engine import Engine
from k3tvm.schedules.profile import GpuProfile
from tests.bundles import Bundles

PRESET = "k3-tiny"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def compiled(bundles: Bundles) -> Path:
    return bundles.bundle(PRESET)


@pytest.fixture
def copy(compiled: Path, tmp_path: Path) -> Path:
    """A bundle to be damaged, in another place."""
    return Path(shutil.copytree(compiled, tmp_path / "moved"))


@pytest.fixture
def checkpoint(bundles: Bundles, tmp_path: Path) -> Path:
    """A checkpoint to be damaged; times of change are kept."""
    return Path(shutil.copytree(bundles.checkpoint(PRESET), tmp_path / "checkpoint"))


@pytest.fixture
def no_kernels(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in no time: the library is a copy, since these tests look at parameters only."""

    class Library:
        def export_library(self, path: str) -> None:
            shutil.copy(compiled / "code" / "cpu.so", path)

    monkeypatch.setattr(compiler, "compile_module", lambda *args: Compiled(args[2], Library(), ()))


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files, except the manifest's, which names the source."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
    return {str(p.relative_to(folder)): sha256(p) for p in files}


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


# --- whole bundles --------------------------------------------------------------------------------


def test_a_moved_bundle_gives_the_same_bits(compiled: Path, copy: Path) -> None:
    want = Engine.open(compiled)
    got = Engine.open(copy)
    np.testing.assert_array_equal(got.logits(IDS), want.logits(IDS))
    np.testing.assert_array_equal(got.decode([7]), want.decode([7]))


def test_it_holds_what_the_manifest_lists_and_nothing_else(compiled: Path) -> None:
    manifest = Engine.open(compiled).manifest
    listed = {manifest.code[0].file.path, *(f.path for f in manifest.params)}
    assert set(contents(compiled)) == listed
    assert {a.file for a in manifest.arrays} == {f.path for f in manifest.params}
    for entry in (manifest.code[0].file, *manifest.params):
        assert sha256(compiled / entry.path) == entry.sha256
    assert all(a.offset % 64 == 0 for a in manifest.arrays)


@pytest.mark.parametrize("preset", [PRESET, "kimi-linear-tiny"])
def test_every_checkpoint_tensor_comes_back_bit_for_bit(bundles: Bundles, preset: str) -> None:
    """Except res_norm * res_proj, of which the product is kept, and A_log, kept as exp(A_log)."""
    engine = bundles.engine(preset)
    source = Checkpoint.open(bundles.checkpoint(preset))
    back = BundleTensors(engine.config, engine.manifest.arrays, engine.arrays)
    assert set(back) == set(source.by_name) and len(back) == len(set(back))
    for name in back:
        want, got = source.tensor(name), back[name]
        if "_res_norm" in name or "_res_proj" in name:
            continue
        if name.endswith("A_log"):
            heads = engine.config.kda_heads
            np.testing.assert_allclose(got.reshape(-1), want.reshape(-1)[:heads], atol=2e-7)
        else:
            assert got.shape == want.shape
            np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32), name)
    for name in (n for n in back if n.endswith("_res_norm.weight")):
        proj = name.replace("_norm", "_proj")
        product = source.tensor(name).astype(np.float32) * source.tensor(proj).astype(np.float32)
        np.testing.assert_array_equal((back[name] * back[proj]).ravel(), product.ravel())


# --- interrupted and failed conversions (F21, F8) -------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from k3tvm.bundle import params
from k3tvm.compiler.compile import Options, compile_checkpoint

stream, count = params._stream, 0

def dying(unit, pieces_of):
    for i, data in enumerate(stream(unit, pieces_of)):
        yield data
        if unit.name == "layers.3" and i == 9:
            os.kill(os.getpid(), signal.SIGKILL)

params._stream = dying
compile_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Options())
"""


def test_f21_a_killed_conversion_is_resumed_bit_for_bit(
    checkpoint: Path, compiled: Path, tmp_path: Path, no_kernels: None
) -> None:
    """Killed in the middle of a file; finished files are kept, one of them is damaged meanwhile."""
    out, partial = tmp_path / "out", tmp_path / "out.partial" / "params"
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", KILLED, str(checkpoint), str(out)]
    dead = subprocess.run(command, env=os.environ | {"PYTHONPATH": root}, check=False)
    assert dead.returncode == -signal.SIGKILL and not out.exists()
    assert sorted(p.name for p in partial.iterdir() if p.suffix == ".bin") == [
        "embed.bin",
        *(f"layers.{i}.bin" for i in range(3)),
    ]
    kept = (partial / "layers.1.bin").stat()
    with (partial / "layers.0.bin").open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    (partial / "stray.part").write_bytes(b"of another run")
    compile_checkpoint(checkpoint, out, Options())
    assert (out / "params" / "layers.1.bin").stat().st_ino == kept.st_ino
    assert {k: v for k, v in contents(out).items() if "params" in k} == {
        k: v for k, v in contents(compiled).items() if "params" in k
    }
    assert not partial.exists() and not (out / "params" / "journal.json").exists()
    manifest = Engine.open(out).manifest
    assert len(contents(out)) == 1 + len(manifest.params)


def test_f21_names_sizes_and_foreign_journals_are_not_trusted(
    checkpoint: Path, compiled: Path, tmp_path: Path, no_kernels: None
) -> None:
    """Files of the right name and size from elsewhere, with journals that cannot vouch for them."""
    params = tmp_path / "out.partial" / "params"
    shutil.copytree(compiled / "params", params)
    for path in params.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    fake = {"origin": "somewhere", "sha256": sha256(params / "embed.bin")}
    for journal in ("", "[]", '{"embed": 3}', json.dumps({"embed": fake})):
        (params / "journal.json").write_text(journal)
        out = tmp_path / "out"
        compile_checkpoint(checkpoint, out, Options())
        assert contents(out) == contents(compiled)
        shutil.rmtree(out)
        shutil.copytree(compiled / "params", params)
        (params / "embed.bin").write_bytes(bytes((params / "embed.bin").stat().st_size))


def test_f21_a_changed_checkpoint_is_converted_anew(
    bundles: Bundles, tmp_path: Path, no_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same names and sizes, other values: what an interrupted run left is not reused."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(bundles.checkpoint(PRESET), first)
    shutil.copytree(first, second)
    for shard in second.glob("*.safetensors"):
        with shard.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ParamsWriter, "close", interrupt)
        compile_checkpoint(first, tmp_path / "out", Options())
    assert (tmp_path / "out.partial" / "params" / "head.bin").is_file()
    compile_checkpoint(second, tmp_path / "out", Options())
    compile_checkpoint(second, tmp_path / "want", Options())
    assert contents(tmp_path / "out") == contents(tmp_path / "want")


def interrupt(writer: ParamsWriter, files: object) -> None:
    raise KeyboardInterrupt


def test_f8_a_fault_in_the_last_shard_leaves_nothing(
    checkpoint: Path, tmp_path: Path, no_kernels: None
) -> None:
    """An MXFP4 scale of 255, found while the last layer is converted: the old bundle stays."""
    name = "language_model.model.layers.6.block_sparse_moe.experts.9.w2.weight_scale"
    out = tmp_path / "out"
    compile_checkpoint(checkpoint, out, Options())
    before = contents(out)
    overwrite(checkpoint, name, 17, b"\xff")
    with pytest.raises(CheckpointError, match="255") as caught:
        compile_checkpoint(checkpoint, out, Options())
    assert name in str(caught.value)
    assert contents(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "out"]


def overwrite(checkpoint: Path, name: str, at: int, data: bytes) -> None:
    """Change bytes of one tensor in its shard."""
    opened = Checkpoint.open(checkpoint)
    shard = opened.tensors[name].shard
    start = shard.read_bytes().index(opened.tensor(name).tobytes())
    with shard.open("r+b") as file:
        file.seek(start + at)
        file.write(data)


def test_f11_a_router_bias_that_is_no_number_is_refused(
    checkpoint: Path, tmp_path: Path, no_kernels: None
) -> None:
    """At run time it would only silence its expert: every logit stays finite."""
    name = "language_model.model.layers.3.block_sparse_moe.gate.e_score_correction_bias"
    overwrite(checkpoint, name, 8, struct.pack("<f", float("nan")))
    with pytest.raises(CheckpointError, match="not finite") as caught:
        compile_checkpoint(checkpoint, tmp_path / "out", Options())
    assert name in str(caught.value)


# --- where a bundle is written --------------------------------------------------------------------


def test_an_existing_bundle_is_replaced_and_neighbours_are_left_alone(
    checkpoint: Path, copy: Path, no_kernels: None
) -> None:
    """Even folders with the names that an implementation would take for the old one."""
    bystander = copy.with_name("moved.old")
    bystander.mkdir()
    (bystander / "thesis.txt").write_text("mine")
    (copy / "stray.txt").write_text("not part of a bundle")
    compile_checkpoint(checkpoint, copy, Options(slots=2))
    assert Engine.open(copy).states.slots == 2 and not (copy / "stray.txt").exists()
    assert (bystander / "thesis.txt").read_text() == "mine"
    names = sorted(p.name for p in copy.parent.iterdir())
    assert names == ["checkpoint", "moved", "moved.old"]


def test_output_that_is_no_bundle_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken.partial").mkdir()
    (tmp_path / "taken.partial" / "thesis.txt").write_text("mine")
    for name in ("file", "folder", "absent/out", "taken"):
        with pytest.raises(BundleError) as caught:
            compile_checkpoint(checkpoint, tmp_path / name, Options())
        assert caught.value.cure
    assert (tmp_path / "taken.partial" / "thesis.txt").read_text() == "mine"


def test_room_that_the_model_does_not_have_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for options in (Options(context=4097), Options(context=0), Options(slots=0)):
        with pytest.raises(BundleError, match="context"):
            compile_checkpoint(checkpoint, tmp_path / "out", options)


def test_two_runs_do_not_write_one_bundle(
    checkpoint: Path, tmp_path: Path, no_kernels: None
) -> None:
    """The second one is refused and leaves the first one's work alone."""
    (tmp_path / "out.partial").mkdir()
    with alone(tmp_path / "out.partial"):
        with pytest.raises(BundleError, match="another run"):
            compile_checkpoint(checkpoint, tmp_path / "out", Options())
        assert (tmp_path / "out.partial").is_dir()
    compile_checkpoint(checkpoint, tmp_path / "out", Options())
    assert Engine.open(tmp_path / "out").position() == 0


def test_linking_is_asked_about_first(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler at once; with one that fails, in one line."""
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(TargetError, match="no C.. compiler"):
            compile_checkpoint(checkpoint, tmp_path / "out", Options())
    monkeypatch.setattr(
        compiler, "compile_module", lambda *args: Compiled(args[2], Unlinkable(), ())
    )
    with pytest.raises(TargetError, match="cannot be linked: g.. failed"):
        compile_checkpoint(checkpoint, tmp_path / "out", Options())
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("target", ["vulkan:nvidia", "cuda:sm_90a", "metal", "cuda-emulated"])
def test_what_device_code_needs_is_asked_for_first(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Large models take minutes before the first kernel is generated."""

    def absent(profile: GpuProfile) -> None:
        raise TargetError("is missing", where=profile.name)

    monkeypatch.setattr(compiler, "generator", lambda _: SimpleNamespace(check_tools=absent))
    monkeypatch.setattr(compiler, "build_model", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(TargetError, match=f"{target.replace(':', '.')}: is missing"):
        compile_checkpoint(checkpoint, tmp_path / "out", Options(target))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


class Unlinkable:
    def export_library(self, path: str) -> None:
        raise RuntimeError("g++ failed")


# --- loading (F28) --------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no manifest": ("no manifest.json", lambda b: (b / "manifest.json").unlink()),
    "no json": ("cannot be read", lambda b: (b / "manifest.json").write_text("{")),
    "binary": ("cannot be read", lambda b: (b / "manifest.json").write_bytes(b"\xff\xfe\x00")),
    "a list": ("not the manifest", lambda b: (b / "manifest.json").write_text("[]")),
    "foreign": ("not the manifest", lambda b: edit(b, lambda m: m.update(format="x"))),
    "format": ("bundle format 99", lambda b: edit(b, lambda m: m.update(format_version=99))),
    "no device kernels": (
        "bundle format 1, this k3tvm reads 3",
        lambda b: edit(
            b, lambda m: (m.update(format_version=1), m["code"][0].pop("device_kernels"))
        ),
    ),
    "no version": ("bundle format None", lambda b: edit(b, lambda m: m.pop("format_version"))),
    "tvm": ("0.99", lambda b: edit(b, lambda m: m["versions"].update({"apache-tvm": "0.99"}))),
    "no tvm": ("apache-tvm", lambda b: edit(b, lambda m: m["versions"].clear())),
    "field": ("damaged", lambda b: edit(b, lambda m: m.pop("states"))),
    "config": ("damaged", lambda b: edit(b, lambda m: m["config"].pop("num_heads"))),
    "new field": ("damaged", lambda b: edit(b, lambda m: m["config"].update(novel=1))),
    "no code": ("damaged", lambda b: edit(b, lambda m: m["code"].clear())),
    "isa": ("damaged", lambda b: edit(b, lambda m: m["code"][0].update(isa="sse9"))),
    "beyond": ("damaged", lambda b: edit(b, lambda m: m["arrays"][3].update(offset=10**9))),
    "slots": ("slots is 'x'", lambda b: edit(b, lambda m: m.update(slots="x"))),
    "no sites": ("sites is 0", lambda b: edit(b, lambda m: m.update(sites=0))),
    "versions": ("must be objects", lambda b: edit(b, lambda m: m.update(versions=[]))),
    "state": ("damaged", lambda b: edit(b, lambda m: m["states"][0].update(shape=["foo"]))),
    "dtype": ("damaged", lambda b: edit(b, lambda m: m["arrays"][0].update(dtype="O"))),
    "shape": ("is said to", lambda b: edit(b, lambda m: m["arrays"][0].update(shape=[1, 2]))),
    "unaligned": ("misplaced", lambda b: edit(b, lambda m: m["arrays"][1].update(offset=1))),
    "vocabulary": (
        "was changed",
        lambda b: edit(b, lambda m: m["config"].update(vocab_size=10**6)),
    ),
    "fewer sites": ("was changed", lambda b: edit(b, lambda m: m.update(sites=1))),
    "more rows": ("was changed", lambda b: edit(b, lambda m: m["code"][0].update(max_rows=10**5))),
    "no states": ("was changed", lambda b: edit(b, lambda m: m["states"].clear())),
    "no seal": ("was changed", lambda b: edit(b, lambda m: m.pop("seal"))),
    "deep": ("cannot be read", lambda b: (b / "manifest.json").write_text("[" * 100000)),
    "outside": (
        "damaged",
        lambda b: edit(b, lambda m: m["params"][0].update(path="../moved/params/embed.bin")),
    ),
    "library gone": ("is missing", lambda b: (b / "code" / "cpu.so").unlink()),
    "library": ("another content", lambda b: flip(b / "code" / "cpu.so")),
    "params gone": ("is missing", lambda b: (b / "params" / "layers.2.bin").unlink()),
    "params": ("another content", lambda b: flip(b / "params" / "head.bin")),
    "cut": ("bytes, not", lambda b: os.truncate(b / "params" / "embed.bin", 1000)),
}


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # a library that is loaded must keep its pages, or the process crashes at its end
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_f28_damage_and_drift_are_one_line_with_a_cure(copy: Path, damage: str) -> None:
    words, apply = DAMAGE[damage]
    apply(copy)
    with pytest.raises(BundleError, match=words) as caught:
        Engine.open(copy)
    assert caught.value.cure and "\n" not in str(caught.value) and "moved" in caught.value.where


def test_f28_without_hashing_sizes_and_the_library_are_still_checked(copy: Path) -> None:
    """`check=False` is for parameters that take hours to hash; code is small and runs."""
    flip(copy / "params" / "head.bin")
    assert Engine.open(copy, check=False).position() == 0
    os.truncate(copy / "params" / "layers.0.bin", 64)
    with pytest.raises(BundleError, match="bytes, not"):
        Engine.open(copy, check=False)
    shutil.copy(copy / "params" / "layers.1.bin", copy / "params" / "layers.0.bin")
    flip(copy / "code" / "cpu.so")
    with pytest.raises(BundleError):
        Engine.open(copy, check=False)


def test_not_a_folder_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("absent", "file"):
        with pytest.raises(BundleError) as caught:
            Engine.open(tmp_path / name)
        assert "k3tvm compile" in caught.value.cure


def test_a_bundle_without_weights_says_so(
    bundles: Bundles, tmp_path: Path, no_kernels: None
) -> None:
    """Made from config.json alone; its manifest still plans every parameter."""
    config = bundles.checkpoint(PRESET) / "config.json"
    manifest = compile_checkpoint(config, tmp_path / "code", Options(weights=False))
    whole = Engine.open(bundles.bundle(PRESET)).manifest
    assert not manifest.params and manifest.arrays == whole.arrays
    with pytest.raises(BundleError, match="--no-weights"):
        Engine.open(tmp_path / "code")
    with pytest.raises(CheckpointError, match="no safetensors shards"):
        compile_checkpoint(config, tmp_path / "all", Options())


def test_a_machine_without_the_instructions_is_told(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "host_features", lambda: frozenset({"sse2"}))
    with pytest.raises(DeviceError, match="lacks") as caught:
        Engine.open(compiled)
    assert "cpu:portable" in caught.value.cure
