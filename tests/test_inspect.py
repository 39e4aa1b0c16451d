"""`k3tvm inspect`: published totals to the byte, and one line for every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3tvm.checkpoint import Checkpoint
from k3tvm.checkpoint.example import write_example
from k3tvm.checkpoint.inspect import Facts, inspect_checkpoint
from k3tvm.cli.main import main

DATA = Path(__file__).parent / "data"


def facts(path: Path) -> Facts:
    return inspect_checkpoint(Checkpoint.open(path))


MEASURED = """
import json, re, sys, time
from k3tvm.cli.main import main
start = time.monotonic()
status = main(["inspect", sys.argv[1], "--json"])
# not ru_maxrss: a new process begins with that of its parent
kilobytes = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
heavy = sorted({"tvm", "torch", "numpy", "tvm_ffi"} & set(sys.modules))
seconds = time.monotonic() - start
print(json.dumps(dict(status=status, heavy=heavy, kilobytes=kilobytes, seconds=seconds)))
"""


@pytest.fixture(scope="module")
def measured() -> tuple[Facts, dict[str, Any]]:
    """Facts of the published K3 configuration and index, and what a fresh process spent on them."""
    command = [sys.executable, "-c", MEASURED, str(DATA / "kimi-k3")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown, _, cost = done.stdout.rstrip().rpartition("\n")
    return Facts(**json.loads(shown)), json.loads(cost)


@pytest.fixture(scope="module")
def k3(measured: tuple[Facts, dict[str, Any]]) -> Facts:
    return measured[0]


def test_real_index_is_quick_small_and_light(measured: tuple[Facts, dict[str, Any]]) -> None:
    """Under 30 s and 1 GiB, and neither tvm nor torch nor numpy is imported."""
    _, cost = measured
    assert cost["status"] == 0 and cost["heavy"] == []
    assert cost["seconds"] < 30 and cost["kilobytes"] < 1024 * 1024


def test_every_published_tensor_of_k3_is_accounted_for(k3: Facts) -> None:
    assert (k3.tensors, k3.missing, k3.unexpected) == (497_220, 0, 0)
    assert (k3.text_tensors, k3.skipped) == (497_052, 168)
    assert k3.family == "kimi-k3" and k3.compiles and k3.source == "index"


def test_planned_bytes_of_k3_are_the_published_total(k3: Facts) -> None:
    """Text, and what the total leaves for the vision tower and its projector (specification 2)."""
    assert k3.bytes == 1_559_965_606_912
    assert k3.skipped_bytes == 802_428_928 + 92_289_024
    assert k3.total_bytes == 1_560_860_324_864
    assert k3.bytes_by_kind["expert"] == 1_446_456_066_048
    assert sum(k3.bytes_by_kind.values()) == k3.bytes


def test_parameters_of_the_published_models(k3: Facts) -> None:
    """2,779.5 B, 49.12 B and 0.389 B (specification 1 and 2)."""
    assert round(k3.parameters / 1e9, 1) == 2779.5
    assert round(k3.active_parameters / 1e9) == 104
    linear, twin = facts(DATA / "kimi-linear-48b"), facts(DATA / "kimi-k3-0.40b")
    assert round(linear.parameters / 1e9, 2) == 49.12 and linear.family == "kimi-linear"
    assert round(twin.parameters / 1e9, 3) == 0.389 and twin.family == "kimi-k3"
    assert linear.source == twin.source == "config"


@pytest.mark.parametrize("preset", ["k3-tiny", "kimi-linear-tiny"])
def test_plan_without_shards_is_what_the_shards_hold(preset: str, tmp_path: Path) -> None:
    folder = write_example(tmp_path / preset, preset)
    whole, alone = facts(folder), facts(folder / "config.json")
    assert (alone.bytes, alone.parameters) == (whole.bytes, whole.parameters)
    assert alone.tensors == whole.tensors and alone.bytes_by_kind == whole.bytes_by_kind
    assert whole.total_bytes == whole.bytes and whole.skipped_bytes == 0
    assert alone.total_bytes is None and alone.skipped_bytes is None


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from k3tvm.cli.main import main; main(['--help'])\n"
        "print({'tvm', 'torch', 'numpy', 'tvm_ffi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "inspect" in done.stdout and done.stdout.splitlines()[-1] == "set()"


def test_json_has_the_promised_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_example(tmp_path / "k3", "k3-tiny")
    assert main(["inspect", str(folder), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    promised = {"family", "tensors", "parameters", "bytes", "missing", "unexpected", "skipped"}
    assert promised <= set(values) and values["compiles"] is True
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0 < on_disk - values["total_bytes"] < 0.1 * on_disk


def test_misfit_prints_the_facts_and_exits_2_F19(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_example(tmp_path / "k3", "k3-tiny")
    config = (folder / "config.json").read_text().replace('"num_experts": 10', '"num_experts": 11')
    (folder / "config.json").write_text(config)
    assert main(["inspect", str(folder), "--json"]) == 2
    out, err = capsys.readouterr()
    values = json.loads(out)
    assert values["missing"] == 36 and not values["compiles"] and "num_experts" in values["problem"]
    assert err.startswith("error: ") and err.count("\n") == 1 and "36 tensors missing" in err
    assert len(values["examples"]["missing"]) == 5


WRONG_USE = [
    [],
    ["unknown"],
    ["inspect"],
    ["inspect", "/no/such/place"],
    ["inspect", "config.json", "--yaml"],
    ["example", "somewhere"],
    ["example", "somewhere", "--preset", "k4"],
    ["example", "somewhere", "--preset", "k3-tiny", "--seed", "x"],
    ["example", "somewhere", "--preset", "k3-tiny", "--seed", "-1"],
]


@pytest.mark.parametrize("argv", WRONG_USE, ids=" ".join)
def test_wrong_use_is_one_line_and_exit_2(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """As in `k3tvm inspect X | head -1`."""
    code = "import sys; from k3tvm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "inspect", str(DATA / "kimi-linear-48b"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("shards", [True, False])
def test_wrong_total_of_the_index_is_shown(
    shards: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_example(tmp_path / "k3", "k3-tiny")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    for path in () if shards else folder.glob("*.safetensors"):
        path.unlink()
    assert main(["inspect", str(folder)]) == 0 and "not right" not in capsys.readouterr().out
    values["metadata"]["total_size"] += 1
    index.write_text(json.dumps(values))
    assert main(["inspect", str(folder)]) == 0 and "not right" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["kimi-k3-0.40b", "kimi-linear-48b"])
def test_table_tells_the_same_counts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DATA / name)]) == 0
    out = capsys.readouterr().out
    assert f"{facts(DATA / name).tensors:,}" in out and "0 missing, 0 unexpected" in out
