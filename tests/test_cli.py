"""The command line: every command, its output, its errors on one line, and what it imports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tvm.bundle.manifest import Manifest
from k3tvm.cli.main import COMMANDS, main
from k3tvm.errors import DeviceError
from k3tvm.runtime.engine import Engine
from tests.bundles import Bundles

PRESET = "k3-tiny"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bundle(bundles: Bundles) -> str:
    return str(bundles.bundle(PRESET))


@pytest.fixture(scope="module")
def checkpoint(bundles: Bundles) -> str:
    return str(bundles.checkpoint(PRESET))


def process(*args: str, cwd: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; `code` runs after it."""
    program = "import sys; from k3tvm.cli.main import main; status = main(sys.argv[1:]); "
    command = [sys.executable, "-c", program + (code or "sys.exit(status)"), *args]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


# --- help and imports -----------------------------------------------------------------------------


@pytest.mark.parametrize("args", [[], *([c] for c in COMMANDS)], ids=str)
def test_help_teaches_and_exits_0(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args, "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: k3tvm" in text and ("example" in text or "demo" in args)
    assert all(command in text for command in (COMMANDS if not args else ()))


def test_help_and_inspect_need_neither_tvm_nor_torch(checkpoint: str, tmp_path: Path) -> None:
    """And help answers fast: the best of a few, since the machine may be busy."""
    loaded = "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        done = process("--help", cwd=tmp_path, code=loaded)
        seconds.append(time.perf_counter() - start)
    assert not {"tvm", "tvm_ffi", "torch", "numpy"} & set(done.stdout.split("\n")[-2].split())
    assert min(seconds) < 0.3
    done = process("inspect", checkpoint, cwd=tmp_path, code=loaded)
    modules = set(done.stdout.split("\n")[-2].split())
    assert "k3tvm" in modules and not {"tvm", "tvm_ffi", "torch"} & modules


@pytest.mark.parametrize("command", ["compile", "logits", "generate"])
def test_compiler_and_runtime_do_not_import_torch(
    command: str, bundle: str, checkpoint: str, tmp_path: Path
) -> None:
    """Nor does the runtime import the compiler."""
    args = {
        "compile": ["compile", f"{checkpoint}/config.json", "--target", "opencl"],
        "logits": ["logits", bundle, "--ids", "1,2", "-o", "x.npy"],
        "generate": ["generate", bundle, "--ids", "1,2", "--max-tokens", "2"],
    }[command]
    loaded = "print('\\n', *sorted(m for m in sys.modules if sys.modules[m]))"
    modules = set(process(*args, cwd=tmp_path, code=loaded).stdout.split())
    assert "torch" not in modules and "k3tvm.errors" in modules
    assert ("tvm" in modules) == (command == "compile")


# --- the road from example to verify --------------------------------------------------------------


def test_f30_all_commands_from_another_directory(tmp_path: Path) -> None:
    """Relative paths, a process each, nothing found by luck in the working directory."""
    work = tmp_path / "elsewhere"
    work.mkdir()
    bundle = "../all/kimi-linear-tiny.bundle"
    for args in (
        ["demo", "../all", "--preset", "kimi-linear-tiny"],
        ["inspect", "../all/kimi-linear-tiny"],
        ["logits", bundle, "--ids", "1,2,3", "-o", "../logits.npy"],
        ["generate", bundle, "--ids", "1,2,3", "--max-tokens", "3"],
        ["verify", bundle, "--tokens", "9"],
    ):
        done = process(*args, cwd=work)
        assert done.returncode == 0, done.stderr
    assert not list(work.iterdir())
    assert np.load(tmp_path / "logits.npy").shape == (1, 499)


def test_inspect_json_has_the_promised_keys(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", checkpoint, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    promised = {"family", "tensors", "parameters", "bytes", "missing", "unexpected", "skipped"}
    assert promised <= set(facts) and facts["family"] == "kimi-k3"


@pytest.mark.parametrize("how", [[], ["--chunk", "2"], ["--step"]], ids=str)
def test_logits_writes_the_last_row_or_all(
    bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    (tmp_path / "ids").write_text("5 6,\n7\t8, 9\n")
    want = Engine.open(bundle).logits([5, 6, 7, 8, 9])
    out = tmp_path / "out.npy"
    for given in (["--ids", "5,6,7,8,9"], ["--ids-file", str(tmp_path / "ids")]):
        for rows in ([], ["--all"]):
            assert main(["logits", bundle, *given, *how, *rows, "-o", str(out)]) == 0
            got = np.load(out)
            assert got.dtype == np.float32 and got.shape == (5 if rows else 1, 499)
            np.testing.assert_allclose(got, want if rows else want[-1:], atol=1e-4)
    assert "float32 [5, 499]" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids", "out.npy"]


def generated(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["generate", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_is_greedy_and_repeats_itself(
    bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = generated(capsys, bundle, "--ids", "1,2,3", "--max-tokens", "8", "--ignore-eos")
    engine, ids = Engine.open(bundle), [1, 2, 3]
    for _ in range(8):
        engine.reset()
        ids.append(int(np.argmax(engine.prefill(ids))))
    assert facts["ids"] == ids[3:] and facts["prompt"] == [1, 2, 3]
    assert facts["finish_reason"] == "length" and facts["seconds"] > 0
    assert main(["generate", bundle, "--ids", "1,2,3", "--max-tokens", "8", "--ignore-eos"]) == 0
    assert [int(word) for word in capsys.readouterr().out.split()] == ids[3:]


def test_generate_samples_by_its_seed(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = [bundle, "--ids", "1,2,3", "--max-tokens", "20", "--ignore-eos", "--temperature", "1.5"]
    one, same, other = (generated(capsys, *base, "--seed", s)["ids"] for s in ("7", "7", "8"))
    greedy = generated(capsys, *base[:-2])["ids"]
    assert one == same != other and one != greedy
    assert generated(capsys, *base, "--top-k", "1")["ids"] == greedy
    assert generated(capsys, *base, "--top-p", "1e-6")["ids"] == greedy


def test_generate_stops_at_the_end_id_and_at_the_context(
    bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end id of the model is replaced by one that it is about to say."""
    base = ["--ids", "1,2,3", "--max-tokens", "12"]
    free = generated(capsys, bundle, *base, "--ignore-eos")["ids"]
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    manifest = Manifest.load(copy)
    replace(manifest, config=manifest.config | {"eos_token_id": free[4]}).save(copy)
    facts = generated(capsys, str(copy), *base)
    assert facts["ids"] == free[: free.index(free[4]) + 1] and facts["finish_reason"] == "stop"
    assert generated(capsys, str(copy), *base, "--ignore-eos")["ids"] == free
    full = generated(capsys, bundle, *base, "--ignore-eos", "--context", "6")
    assert full["ids"] == free[:4] and full["finish_reason"] == "length"


def test_verify_judges(
    bundle: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:
    """0 within tolerance and 1 out of it, with the same figures as text and JSON."""
    assert main(["verify", bundle, "--tokens", "12", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"] and set(facts["modes"]) == {"prefill", "chunked", "steps"}
    for agreement in facts["modes"].values():
        assert {"nmse", "max_error", "top1", "top10"} <= set(agreement)
        assert agreement["nmse"] <= facts["limit_nmse"]
    monkeypatch.setattr("k3tvm.compare.verify.FACTOR", 1e-4)
    monkeypatch.setattr("k3tvm.compare.verify.FLOOR", 0.0)
    assert main(["verify", bundle, "--ids", "1,2,3,4,5,6"]) == 1
    assert "OUT OF tolerance" in capsys.readouterr().out


def test_bench_json_has_the_promised_keys(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt", "600", "--tokens", "2", "--rounds", "1"]
    assert main(["bench", bundle, *sizes, "--threads", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["threads"] == 1 and facts["memory"]["peak_bytes"] > 0
    decode, prefill = facts["decode"], facts["prefill"]
    assert decode["tokens_per_s"] > 0 and 0 < decode["share_of_read_bandwidth"] < 2
    assert prefill["tokens_per_s"] > 0 and 0 < prefill["share_of_sgemm_peak"] < 1
    arrays = Engine.open(bundle).manifest.arrays
    assert 0 < decode["bytes_per_token"] < sum(a.nbytes for a in arrays)
    assert {k["entry"] for k in facts["kernels"]} == {"decode", "prefill"}


# --- errors ---------------------------------------------------------------------------------------

IDS = ["--ids", "1,2"]
WRONG: dict[str, tuple[str, list[str]]] = {
    "no command": ("COMMAND", []),
    "no such command": ("invalid choice", ["fly"]),
    "no ids": ("--ids", ["generate", "{bundle}"]),
    "both": ("not allowed", ["generate", "{bundle}", *IDS, "--ids-file", "x"]),
    "word": ("'x' is not a token id", ["generate", "{bundle}", "--ids", "1,x"]),
    "float": ("'1.5' is not a token id", ["generate", "{bundle}", "--ids", "1.5"]),
    "two signs": ("'--1' is not a token id", ["generate", "{bundle}", "--ids=--1"]),
    "superscript": ("is not a token id", ["generate", "{bundle}", "--ids", "²"]),
    "underscore": ("is not a token id", ["generate", "{bundle}", "--ids", "1_0"]),
    "huge": ("is not a token id", ["generate", "{bundle}", "--ids", "9" * 30]),
    "empty": ("no token ids", ["generate", "{bundle}", "--ids", ","]),
    "negative": ("outside of the vocabulary", ["generate", "{bundle}", "--ids=-1"]),
    "beyond": ("outside of the vocabulary", ["logits", "{bundle}", "--ids", "499", "-o", "o.npy"]),
    "ids file": ("cannot be read", ["generate", "{bundle}", "--ids-file", "absent"]),
    "binary ids": ("cannot be read", ["generate", "{bundle}", "--ids-file", "binary"]),
    "no bundle": ("manifest.json", ["generate", "absent", *IDS]),
    "a checkpoint": ("manifest.json", ["generate", "{checkpoint}", *IDS]),
    "a file": ("manifest.json", ["verify", "binary"]),
    "context": ("do not fit", ["generate", "{bundle}", *IDS, "--context", "1"]),
    "no context": ("context 0", ["generate", "{bundle}", *IDS, "--context", "0"]),
    "negative context": ("context -4", ["verify", "{bundle}", "--context", "-4"]),
    "long context": ("positions", ["generate", "{bundle}", *IDS, "--context", "999999999999"]),
    "threads": ("threads", ["generate", "{bundle}", *IDS, "--threads", "0"]),
    "many threads": ("CPUs", ["generate", "{bundle}", *IDS, "--threads", "9" * 30]),
    "no tokens": ("--max-tokens", ["generate", "{bundle}", *IDS, "--max-tokens", "0"]),
    "cold": ("temperature", ["generate", "{bundle}", *IDS, "--temperature", "-1"]),
    "nan": ("temperature", ["generate", "{bundle}", *IDS, "--temperature", "nan"]),
    "top-p": ("top-p", ["generate", "{bundle}", *IDS, "--top-p", "0"]),
    "top-k": ("top-k", ["generate", "{bundle}", *IDS, "--top-k", "-2"]),
    "seed": ("seed", ["generate", "{bundle}", *IDS, "--seed", "-1"]),
    "verify seed": ("seed", ["verify", "{bundle}", "--seed", "-1"]),
    "chunk": ("--chunk", ["logits", "{bundle}", *IDS, "--chunk", "0", "-o", "o.npy"]),
    "output folder": ("is not a folder", ["logits", "{bundle}", *IDS, "-o", "absent/o.npy"]),
    "output below a file": ("is not a folder", ["logits", "{bundle}", *IDS, "-o", "binary/o.npy"]),
    "output is a folder": ("is a folder", ["logits", "{bundle}", *IDS, "-o", "folder"]),
    "output is a device": ("a device", ["logits", "{bundle}", *IDS, "-o", "/dev/null"]),
    "no checkpoint": ("no such file", ["compile", "absent", "--target", "cpu"]),
    "no target": ("--target", ["compile", "{checkpoint}"]),
    "target": ("choose one of: cpu", ["compile", "{checkpoint}", "--target", "opencl"]),
    "cut target": ("nothing stands", ["compile", "{checkpoint}", "--target", "vulkan:"]),
    "no device": ("choose one of", ["generate", "{bundle}", *IDS, "--device", ""]),
    "cut device": ("nothing stands", ["generate", "{bundle}", *IDS, "--device", "cpu:"]),
    "variant": ("avx512", ["compile", "{checkpoint}", "--target", "cpu:mmx"]),
    "not a bundle": ("not a bundle", ["compile", "{checkpoint}", "--target", "cpu", "-o", "."]),
    "root": ("not a bundle", ["compile", "{checkpoint}", "--target", "cpu", "-o", "/"]),
    "too long": ("4096", ["compile", "{checkpoint}", "--target", "cpu", "--context", "5000"]),
    "dtype": ("invalid choice", ["compile", "{checkpoint}", "--target", "cpu", "--dtype", "int8"]),
    "dump": ("dump", ["compile", "{checkpoint}", "--target", "cpu", "--dump", "binary/dump"]),
    "bench": ("at least 1", ["bench", "{bundle}", "--tokens", "0"]),
    "preset": ("invalid choice", ["example", "x", "--preset", "k4"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_one_line_and_exit_2(
    case: str,
    bundle: str,
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    Path("folder").mkdir()
    words, args = WRONG[case]
    assert main([a.format(bundle=bundle, checkpoint=checkpoint) for a in args]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not out and sorted(p.name for p in tmp_path.iterdir()) == ["binary", "folder"]


def test_bad_logits_are_an_error_of_the_command(
    bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F11 at the command line: not token 0 for ever, but one line that names the layer."""
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    norm = next(a for a in manifest["arrays"] if a["name"] == "layers.4.mixer.norm")
    with (copy / norm["file"]).open("r+b") as file:
        file.seek(norm["offset"])
        file.write(np.float32(np.nan).tobytes())
    assert main(["generate", str(copy), "--ids", "1,2", "--no-check"]) == 2
    assert "layer 4 (attention)" in capsys.readouterr().err
    assert main(["generate", str(copy), "--ids", "1,2"]) == 2
    assert "another content" in capsys.readouterr().err


def test_an_error_in_the_middle_stands_on_a_line_of_its_own(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids that were printed before it stay readable."""
    decode = Engine.decode

    def fail_at_five(engine: Engine, *args: Any) -> Any:
        if engine.position() == 5:
            raise DeviceError("the device was lost")
        return decode(engine, *args)

    monkeypatch.setattr(Engine, "decode", fail_at_five)
    assert main(["generate", bundle, "--ids", "1,2", "--ignore-eos"]) == 2
    out, err = capsys.readouterr()
    assert len(out.split()) == 4 and out.endswith("\n") and err.count("\n") == 1


@pytest.mark.parametrize(("path", "status"), [("{checkpoint}", 0), ("absent", 2)])
def test_a_process_without_standard_output(
    checkpoint: str, tmp_path: Path, path: str, status: int
) -> None:
    """As services may start them: with the descriptor closed."""
    path = path.format(checkpoint=checkpoint)
    command = f"{sys.executable} -m k3tvm inspect {path} >&-"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == status and done.stderr.count("\n") == (1 if status else 0)


def test_a_closed_pipe_ends_quietly(bundle: str, tmp_path: Path) -> None:
    """`k3tvm ... | head -1` prints no traceback."""
    command = f"{sys.executable} -m k3tvm inspect {bundle}/../{PRESET} | head -1"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr and done.stdout.count("\n") == 1
