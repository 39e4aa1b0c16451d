"""F: a report that leaves kernels out, or says other things than what was compiled."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from k3tvm._tvm import tvm
from k3tvm.bundle.kernels import Resources, Traffic, device_kernel, kernel_entry
from k3tvm.bundle.manifest import Manifest
from k3tvm.checkpoint.presets import PRESETS
from k3tvm.cli.main import main
from k3tvm.compiler.targets import profile_of
from k3tvm.errors import TargetError
from k3tvm.relax_models.config import ModelConfig
from k3tvm.relax_models.decoder import build_model
from k3tvm.relax_models.operators import Linear, WeightFormat
from k3tvm.report.calls import calls_of
from k3tvm.report.devices import CUDA_DEVICES, H200, LAUNCH, estimate, figures_for
from k3tvm.report.kept import kept_traffic
from k3tvm.report.minimum import minimum
from k3tvm.report.points import points_for
from k3tvm.report.rows import function_rows, operator_rows
from k3tvm.report.statements import count_launches
from k3tvm.report.table import _grid, write_report
from k3tvm.report.traffic import launch_count, traffic_of
from k3tvm.schedules.registry import select
from tests.devices import require

SMALL = ("k3-tiny", "kimi-linear-tiny")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of a bundle that was compiled with the command line; its report lies beside it."""
    require("vulkan")
    folder = tmp_path_factory.mktemp("report")
    config = folder / "config.json"
    config.write_text(json.dumps(PRESETS["kimi-linear-tiny"].config))
    out, report = str(folder / "b"), str(folder / "r.json")
    words = [str(config), "--target", "vulkan", "--no-weights", "-o", out, "--report", report]
    assert main(["compile", *words]) == 0
    return Manifest.load(folder / "b")


def test_every_device_function_has_an_operator_and_every_operator_traffic(manifest):
    (code,) = manifest.code
    keys = {k.key for k in code.kernels}
    assert {k.operator for k in code.device_kernels} == keys
    launched = {k.operator for k in code.device_kernels if k.traffic}
    assert launched == keys
    assert all(k.minimum for k in code.kernels)


def test_names_and_threads_are_those_that_were_built(manifest):
    """The analysis numbers launches as TVM numbers device functions."""
    (code,) = manifest.code
    for kernel in code.device_kernels:
        for t in kernel.traffic:
            assert t.workgroups >= 1
        assert all(part for part in kernel.grid)
    assert {p.name for p in code.points} == {
        t.point for k in code.device_kernels for t in k.traffic
    }


def test_manifest_keeps_it(manifest):
    (code,) = manifest.code
    for k in code.device_kernels:
        assert device_kernel(json.loads(json.dumps(asdict(k)))) == k
    for e in code.kernels:
        assert kernel_entry(json.loads(json.dumps(asdict(e)))) == e


@pytest.mark.parametrize("suffix", [".md", ".txt", ".json"])
def test_every_form_names_every_operator_and_function(manifest, suffix, tmp_path):
    path = tmp_path / f"report{suffix}"
    write_report(manifest, path)
    text = path.read_text()
    (code,) = manifest.code
    assert all(k.key in text for k in code.kernels)
    assert all(k.name in text for k in code.device_kernels)
    if suffix == ".json":
        (target,) = json.loads(text)["targets"]
        assert target["target"] == code.target
        assert len(target["functions"]) == len(code.device_kernels)
        assert [p["name"] for p in target["points"]] == [p.name for p in code.points]
    else:
        assert "estimate" in text and "<= " in text


def test_rows_are_sums_of_launches(manifest):
    (code,) = manifest.code
    for point in code.points:
        rows = operator_rows(code, point.name)
        assert sum(r.moved_bytes for r in rows) == sum(
            t.read_bytes + t.written_bytes
            for k in code.device_kernels
            for t in k.traffic
            if t.point == point.name
        )
        assert all(r.moved_bytes >= r.minimum_bytes for r in rows)
        times = [r.seconds * r.calls for r in rows]
        assert times == sorted(times, reverse=True)
    assert len(function_rows(code)) == len(code.device_kernels)


@pytest.mark.parametrize("suffix", [".md", ".txt"])
def test_an_operator_that_was_not_counted_is_not_left_out(manifest, suffix, tmp_path):
    (code,) = manifest.code
    lost = code.kernels[0].key
    kept = [replace(k, traffic=()) if k.operator == lost else k for k in code.device_kernels]
    partial = replace(manifest, code=(replace(code, device_kernels=tuple(kept)),))
    write_report(partial, tmp_path / f"r{suffix}")
    text = (tmp_path / f"r{suffix}").read_text()
    assert f"{lost} " in text and "not counted" in text
    assert "Without 1 operators that could not be counted." in text
    write_report(manifest, tmp_path / f"r{suffix}")
    assert "not counted" not in (tmp_path / f"r{suffix}").read_text()


@pytest.mark.parametrize(
    ("target", "option"),
    [
        ("cpu", ["--report", "r.md"]),
        ("cuda-emulated", ["--report", "r.md"]),
        ("metal", ["--allow-spills", "kda_*"]),
    ],
)
def test_options_that_no_target_has_a_use_for_are_refused(target, option, tmp_path, capsys):
    words = [str(tmp_path), "--target", target, "--no-weights", "-o", str(tmp_path / "b")]
    assert main(["compile", *words, *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_an_unknown_multiprocessor_leaves_the_occupancy_open(manifest):
    resources = Resources("sm_88", 40, 0, 0, 0, 1024)
    (code,) = manifest.code
    known = replace(code.device_kernels[0], resources=(resources,))
    (row,) = function_rows(replace(code, device_kernels=(known,)))
    assert row.occupancy is None and row.limit == ""


def test_unwritable_report_is_refused_before_compiling(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PRESETS["k3-tiny"].config))
    words = [str(config), "--target", "vulkan", "--no-weights", "-o", str(tmp_path / "b")]
    assert main(["compile", *words, "--report", str(tmp_path / "no" / "r.md")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_report_onto_a_folder_is_an_error(manifest, tmp_path):
    with pytest.raises(TargetError, match="cannot be written"):
        write_report(manifest, tmp_path)


@pytest.mark.parametrize(
    "preset, act, target",
    [
        ("k3-tiny", "float32", "cuda"),
        ("k3-tiny", "bfloat16", "cuda"),
        ("k3-tiny", "float32", "metal"),
        ("kimi-linear-tiny", "float32", "vulkan:nvidia"),
    ],
)
def test_every_kernel_is_understood(preset, act, target):
    """No statement, expression or named device function is unknown, and nothing is free.

    A new device function needs a row in `k3tvm.report.effects`.
    """
    config = ModelConfig.from_json(PRESETS[preset].config, preset)
    profile = profile_of(target)
    model = build_model(config, stored, act, captured=profile.captured)
    calls = {p: calls_of(model.module, entry_of(p.name, profile.captured)) for p in points_for(64)}
    for op in model.operators.values():
        for point in (p for p, called in calls.items() if called.count[op.key]):
            for one in traffic_of(select(op, profile), point):
                assert not [n for n in one.notes if "unknown length" not in n]
                assert one.traffic.requested_bytes > 0
                assert one.traffic.workgroups > 0
                t = one.traffic
                moved = t.read_bytes + t.written_bytes
                assert moved <= t.group_bytes <= t.requested_bytes


def test_rows_behind_the_last_ones_are_sequences():
    """The head of a prefill has a row for each sequence, whatever the length of the prompt."""
    config = ModelConfig.from_json(PRESETS["k3-tiny"].config, "k3-tiny")
    model = build_model(config, stored, "float32")
    calls, point = calls_of(model.module, "prefill"), points_for(64)[2]
    linear = [op for op in model.operators.values() if isinstance(op, Linear)]
    head = [op for op in linear if op.rows == config.vocab_size]
    assert [calls.point_of(op, point).rows for op in head] == [1]
    assert {calls.point_of(op, point).rows for op in linear if op not in head} == {64}


@pytest.mark.parametrize("target", ["cuda", "metal", "vulkan:nvidia"])
@pytest.mark.parametrize("rows", [16, 2560, 49376, 67584, 163840])
@pytest.mark.parametrize("fmt", ["bfloat16", "mxfp4", "float32"])
def test_no_launch_is_out_of_reach(target, rows, fmt):
    """TVM would leave it out, and the functions behind it would have other numbers than here."""
    kernel = select(Linear(rows, 7168, fmt, "float32", 7168), profile_of(target))
    simple = tvm.tirx.transform.StmtSimplify()(tvm.IRModule({"main": kernel.func}))["main"]
    assert count_launches(simple.body) == launch_count(kernel)


def stored(stem: str) -> WeightFormat:
    """As in the published checkpoints: experts in MXFP4."""
    return "mxfp4" if ".experts." in stem else "bfloat16"


def entry_of(point: str, captured: bool) -> str:
    decode = "decode_captured" if captured else "decode"
    return "prefill" if point.startswith("prefill") else decode


def test_what_is_kept_is_what_was_counted(monkeypatch, tmp_path):
    """A second look gives the same, and a changed kernel is counted anew."""
    monkeypatch.setenv("K3TVM_CACHE", str(tmp_path))
    points = list(points_for(64))[:2]
    kernels = [
        select(Linear(n, 32, "float32", "float32", 32), profile_of("cuda")) for n in (16, 32)
    ]
    first = [kept_traffic(k, points) for k in kernels]
    assert first == [kept_traffic(k, points) for k in kernels]
    assert first[0] == [one for p in points for one in traffic_of(kernels[0], p)]
    assert first[0] != first[1]
    assert len(list((tmp_path / "traffic").iterdir())) == 4


def test_calls_follow_the_layers():
    """Every layer has one output projection of its mixer and one router where it has experts."""
    config = ModelConfig.from_json(PRESETS["k3-tiny"].config, "k3-tiny")
    model = build_model(config, stored, "float32")
    calls = calls_of(model.module, "prefill").count
    named = {key: model.operators[key].name for key in calls}
    kinds = [config.layer_kinds[i] for i in range(config.num_layers)]
    count = {kind: sum(n for k, n in calls.items() if named[k] == kind) for kind in named.values()}
    assert count["kda_chunk"] == kinds.count("kda")
    assert count["mla_attention"] == kinds.count("mla")
    assert count["router"] == sum(config.ffn_kind(i) == "moe" for i in range(config.num_layers))


def test_minimum_counts_the_chosen_experts_only():
    config = ModelConfig.from_json(PRESETS["k3-tiny"].config, "k3-tiny")
    model = build_model(config, stored, "float32")
    op = next(o for o in model.operators.values() if o.name == "expert_linear")
    one, many = (minimum(op, p).read_bytes for p in points_for(64)[:2])
    assert one < many / 2


@pytest.mark.parametrize(
    "changes, bound, seconds",
    [
        ({"read_bytes": 48 * 10**9}, "memory", 0.01),
        ({"flops": int(66.9e12)}, "compute", 1.0),
        ({"integer_ops": int(66.9e12)}, "compute", 2.0),
        ({"matrix_flops": int(989e12)}, "matrix", 1.0),
        ({}, "latency", LAUNCH),
    ],
)
def test_estimate_is_the_longest_of_its_parts(changes, bound, seconds):
    zero = dict.fromkeys(
        ("read_bytes", "written_bytes", "group_bytes", "requested_bytes", "flops"), 0
    )
    facts = zero | {"matrix_flops": 0, "integer_ops": 0} | changes
    found = estimate(Traffic("p", 1, exact=True, **facts), H200)
    assert found.bound == bound
    assert found.seconds == pytest.approx(seconds)


def test_figures_of_devices_are_plausible():
    """Every default architecture has a device, and no rate is off by a factor of a thousand."""
    assert figures_for("cuda", {"sm_80", "sm_90a"}) is H200
    for device in {
        *CUDA_DEVICES.values(),
        figures_for("metal", set()),
        figures_for("vulkan", set()),
    }:
        assert 1e11 < device.bytes < 1e13
        assert 1e12 < device.flops < 1e15
        assert device.flops <= device.matrix_flops < 1e16
        assert device.source
    assert set(profile_of("cuda").archs) <= set(CUDA_DEVICES)


@pytest.mark.parametrize(
    "extents, text",
    [
        (("min(m * 96, 32768)", "(m * 96 + 32767) // 32768"), "m * 96"),
        (("min(m * 96, 32768)", "(m * 97 + 32767) // 32768"), None),
        (("448", "1"), "448"),
        (("n", "m", "2"), "n, m, 2"),
        ((), ""),
    ],
)
def test_grids_are_readable(extents, text):
    assert _grid(extents) == (text if text is not None else ", ".join(extents))


def test_path_of_the_report_needs_no_folder(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_report(manifest, Path("r.md"))
    assert Path("r.md").read_text().startswith("# ")
