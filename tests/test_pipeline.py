"""The compile pipeline: shared code, unique kernels, dumps, refusals, and mixed storage formats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3tvm._tvm import relax
from k3tvm.checkpoint import Checkpoint
from k3tvm.checkpoint.presets import PRESETS, TINY_K3, TINY_KDA, k3
from k3tvm.compare.restore import BundleTensors
from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.compiler.formats import formats_of
from k3tvm.compiler.pipeline import phases
from k3tvm.compiler.plan import plan_units
from k3tvm.compiler.select import select_kernels
from k3tvm.compiler.targets import profile_of
from k3tvm.compiler.targets.cpu import cpu_profile
from k3tvm.errors import TargetError
from k3tvm.relax_models import operators as ops
from k3tvm.relax_models.config import ModelConfig
from k3tvm.relax_models.decoder import Model, build_model
from k3tvm.runtime.engine import Engine
from k3tvm.schedules.profile import CpuProfile
from tests.bundles import Bundles
from tests.tolerances import tolerance
from tests.truth import Truth, by_steps, in_cuts, random_prompt

CPU = profile_of("cpu")


def published(stem: str) -> ops.WeightFormat:
    return "mxfp4" if ".experts." in stem else "bfloat16"


def model_of(config: dict[str, Any]) -> Model:
    return build_model(ModelConfig.from_json(config), published, "float32")


def repeated(count: int) -> dict[str, Any]:
    """A K3 of `count` layers, every fourth of them MLA, in one AttnRes block."""
    sizes = TINY_K3 | {"num_hidden_layers": count, "attn_res_block_size": 4}
    return k3(sizes, TINY_KDA, tuple(range(4, count + 1, 4)))


# --- shared code ----------------------------------------------------------------------------------


def functions(model: Model) -> list[str]:
    return [gvar.name_hint for gvar, _ in model.module.functions_items()]


def test_40_layers_have_the_code_of_8() -> None:
    """Functions and kernels alike, but for the width of the AttnRes bank in the names."""
    few, many = (model_of(repeated(count)) for count in (8, 40))
    assert sorted(functions(few)) == sorted(functions(many))
    assert sorted(o.name for o in few.operators.values()) == sorted(
        o.name for o in many.operators.values()
    )
    assert len(many.parameters) > 4 * len(few.parameters) and many.sites == 81


def test_layers_of_one_kind_call_one_function() -> None:
    """Of 40 layers: dense or experts, KDA step or chunk or MLA, at the start of a block or not."""
    names = functions(model_of(repeated(40)))
    kinds = {
        "dense",
        "moe",
        "mla",
        "kda_step",
        "kda_chunk",
        "kda_step_restart",
        "kda_chunk_restart",
    }
    rest = {"embed", "head", "head_every_row", "prefill", "decode", "logits", "sample"}
    assert set(names) == kinds | rest


# --- names ----------------------------------------------------------------------------------------

WIDTHS = (16, 1, 11, 111)
NUMBERS = (5.0, -5.0, 0.5, -0.5, 50.0, 1e-5, 1e-6, 1e5, 1e20, 1e-20, None)


def neighbours() -> Iterator[ops.Operator]:
    """Operators that differ in one field, with values whose spellings resemble each other."""
    acts: tuple[ops.Activation, ...] = ("float32", "bfloat16")
    for width, eps, act in itertools.product(WIDTHS, NUMBERS, acts):
        if eps is not None:
            yield ops.RmsNorm(width, eps, act)
            yield ops.AttnResNorm(width, 1, eps, act)
            yield ops.AttnResNorm(1, width, eps, act)
        yield ops.KdaGate(1, width, eps, 1, 11)
        yield ops.KdaGate(1, width, eps, 11, 1)
    for act, name in itertools.product(acts, (ops.KdaStep, ops.KdaChunk)):
        yield from (name(a, b, c, act) for a, b, c in itertools.product((1, 11), repeat=3))
    for a, b in itertools.product(WIDTHS, WIDTHS):
        yield ops.ExpertSort(a, b)
        for renormalize, scale in itertools.product((True, False), NUMBERS[:-1]):
            yield ops.Router(a, b, 1, 1, renormalize, scale, 1)


def test_different_operators_have_different_names() -> None:
    """A kernel's name is its symbol: two operators with one name would share a kernel."""
    found: dict[str, ops.Operator] = {}
    for op in neighbours():
        assert found.setdefault(op.key, op) == op, op.key
        assert op.key.isidentifier()
    assert len(found) > 300


@pytest.mark.parametrize("preset", [p for p in PRESETS if "bench" not in p])
def test_every_kernel_of_a_model_has_its_name(preset: str) -> None:
    model = model_of(PRESETS[preset].config)
    assert all(key == op.key for key, op in model.operators.items())
    assert len({*model.operators}) == len({*model.operators.values()})


# --- phases ---------------------------------------------------------------------------------------


def test_dump_writes_the_module_after_every_phase(bundles: Bundles, tmp_path: Path) -> None:
    """And the kernel table says who serves each operator and why."""
    config, dump = bundles.checkpoint("k3-dense-tiny") / "config.json", tmp_path / "dump"
    options = Options(weights=False, dump=dump)
    manifest = compile_checkpoint(config, tmp_path / "out", options)
    names = ["model", "select_kernels", *(p.name for p in phases(cpu_profile()))]
    assert sorted(p.name for p in dump.iterdir()) == [
        f"{i:02d}_{n}.py" for i, n in enumerate(names)
    ]
    first, second = ((dump / f"{i:02d}_{n}.py").read_text() for i, n in enumerate(names[:2]))
    kernels = manifest.code[0].kernels
    for kernel in kernels:
        assert kernel.key in first and f"def {kernel.key}" in second
        assert kernel.reason and "." in kernel.schedule
    assert "call_dps_packed" in first and "call_dps_packed" not in second
    assert {k.operator for k in kernels} >= {"linear", "kda_step", "kda_chunk", "mla_attention"}


def test_selection_leaves_no_call_by_name() -> None:
    model = model_of(PRESETS["k3-tiny"].config)
    module, kernels = select_kernels(model.module, model.operators, CPU)
    assert {k.operator for k in kernels} == {*model.operators.values()}
    left = []
    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, lambda e: left.append(called(e)))
    assert "relax.call_tir" in left
    assert not {"relax.call_dps_packed", "relax.call_inplace_packed"} & {*left}


def called(expr: Any) -> str:
    return getattr(expr.op, "name", "") if isinstance(expr, relax.Call) else ""


def test_f25_an_operator_without_a_kernel_is_refused_with_reasons() -> None:
    """A device that no schedule is for: the error lists every schedule's answer."""
    model = model_of(PRESETS["k3-tiny"].config)
    profile = replace(CPU, name="toaster:1")
    object.__setattr__(profile, "family", "toaster")
    with pytest.raises(TargetError, match="no kernel for toaster:1") as caught:
        select_kernels(model.module, model.operators, profile)
    assert "is for cpu" in str(caught.value) and caught.value.where in model.operators


@pytest.mark.parametrize("name", ["opencl", "cpu:neon", "", "CPU"])
def test_f26_an_unknown_target_is_refused_by_name(name: str) -> None:
    with pytest.raises(TargetError, match="choose one of"):
        profile_of(name)


@pytest.mark.parametrize("name", ["cpu:", "cpu-", "vulkan:", "vulkan-", "vulkan:from-device:"])
def test_f26_a_target_that_is_cut_short_is_not_guessed(name: str) -> None:
    """What a script asks for whose variable is empty."""
    with pytest.raises(TargetError, match="nothing stands after"):
        profile_of(name)


@pytest.mark.parametrize("variant", ["portable", "avx2", "avx512"])
def test_a_named_level_is_what_is_compiled_for(variant: str) -> None:
    profile = profile_of(f"cpu:{variant}")
    assert isinstance(profile, CpuProfile) and profile.isa == variant
    assert profile.name == f"cpu:{variant}" and profile.tvm_target()["kind"] == "llvm"


# --- storage formats ------------------------------------------------------------------------------


def rewritten(source: Path, target: Path, wanted: tuple[str, ...]) -> Path:
    """A copy of a checkpoint with the tensors whose names end so stored as F32."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        for name, values in tensors.items():
            if name.endswith(wanted) and values.dtype == ml_dtypes.bfloat16:
                noise = np.random.default_rng(len(name)).uniform(0.999, 1.001, values.shape)
                tensors[name] = (values.astype(np.float32) * noise).astype(np.float32)
        save_file(tensors, target / path.name)
    index = target / "model.safetensors.index.json"
    facts = json.loads(index.read_text())
    facts["metadata"] = {}
    index.write_text(json.dumps(facts))
    return target


def test_layers_stored_in_other_formats_get_their_own_code(
    bundles: Bundles, tmp_path: Path, one_thread: None
) -> None:
    """F32 among BF16: a layer of its own, parts of a stacked projection, and single experts."""
    wanted = (
        "layers.1.self_attn.o_proj.weight",
        "layers.3.self_attn.k_proj.weight",
        "layers.5.self_attn.kv_b_proj.weight",
        "layers.4.block_sparse_moe.gate.weight",
        "layers.2.block_sparse_moe.experts.7.w2.weight",
        "layers.6.block_sparse_moe.experts.0.w1.weight",
        "embed_tokens.weight",
    )
    mixed = rewritten(bundles.checkpoint("kimi-linear-tiny"), tmp_path / "mixed", wanted)
    checkpoint = Checkpoint.open(mixed)
    checkpoint.check()
    model = build_model(checkpoint.config, formats_of(checkpoint), "float32")
    names = functions(model)
    assert {"kda_step", "kda_step_1", "kda_step_2", "mla", "mla_1"} <= {*names}
    planned = plan_units(model.parameters, model.config, checkpoint)
    assert {a.name for u in planned for a in u.arrays} == {p.name for p in model.parameters}
    compile_checkpoint(mixed, tmp_path / "out", Options(context=64))
    engine = Engine.open(tmp_path / "out")
    ids = random_prompt(engine, 40)
    truth = Truth(engine)
    for run in (in_cuts(engine, ids, [40]), by_steps(engine, ids)):
        assert truth.ratio([run]) <= tolerance("model_ratio")
    back = BundleTensors(engine.config, engine.manifest.arrays, engine.arrays)
    for name in (n for n in checkpoint.tensors if n.endswith(wanted)):
        stored = checkpoint.tensor(name)
        assert stored.dtype == np.float32
        np.testing.assert_array_equal(back[name], stored, name)
