"""Decode as one CUDA graph: the numbers of decode, and nothing but launches inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tvm._tvm import relax, tvm
from k3tvm.checkpoint import Checkpoint
from k3tvm.compiler.formats import formats_of
from k3tvm.compiler.pipeline import compile_module, phases
from k3tvm.compiler.select import select_kernels
from k3tvm.compiler.targets.cpu import cpu_profile
from k3tvm.compiler.targets.cuda import cuda_profile
from k3tvm.relax_models.decoder import CAPTURED, Model, build_model
from k3tvm.runtime.engine import Engine
from k3tvm.runtime.machine import Machine
from tests.bundles import Bundles

NAMES = ("k3-tiny", "kimi-linear-tiny")
NAMED = ("name", "name_hint", "global_symbol")  # of operators, functions, external functions
Results = list[np.ndarray]


def model_of(name: str, bundles: Bundles) -> Model:
    checkpoint = Checkpoint.open(bundles.checkpoint(name))
    formats = formats_of(checkpoint)
    return build_model(checkpoint.config, formats, "float32", ("decode",), captured=True)


def step(engine: Engine, machine: Machine, entry: str, slots: list[int]) -> Results:
    """Experts and logits of one step of several sequences, from their beginning."""
    for slot in slots:
        engine.reset(slot)
    ids = np.arange(3, 3 + len(slots), dtype=np.int32)
    rows = [(slot, i, 1, 0) for i, slot in enumerate(slots)]
    logits, experts = engine._invoke(machine, entry, ids, rows)
    return [np.array(t.numpy()) for t in (*experts, logits)]


@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_decode_computes(name: str, bundles: Bundles, tmp_path: Path) -> None:
    """Bit for bit, for one row and for several in another order, and again over old results."""
    engine, model = bundles.engine(name), model_of(name, bundles)
    library = tmp_path / "captured.so"
    compiled = compile_module(model.module, model.operators, cpu_profile())
    compiled.executable.export_library(str(library))
    machine = Machine(library, engine.device)
    for slots in ([1], [2, 0], [0, 2, 1], [2]):
        plain, flat = (step(engine, machine, entry, slots) for entry in ("decode", CAPTURED))
        assert all(np.array_equal(a, b) for a, b in zip(plain, flat, strict=True))
        assert np.isfinite(flat[-1]).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_one_graph(name: str, bundles: Bundles) -> None:
    """TVM's pass ends a graph at whatever could wait for the host: here there is nothing."""
    calls = calls_of(lowered(model_of(name, bundles))[CAPTURED])
    assert calls.count("vm.builtin.cuda_graph.run_or_capture") == 1
    free = ("vm.builtin.cuda_graph", "relax.memory", "vm.builtin.copy")  # the last hands on a name
    assert not [c for c in calls if not c.startswith(free)]


def lowered(model: Model) -> Any:
    """The module with its memory planned and its graphs taken out."""
    profile = cuda_profile("sm_80")
    module, _ = select_kernels(model.module, model.operators, profile)
    with tvm.target.Target(profile.tvm_target()):
        for phase in phases(profile):
            module = phase.apply(module)
            if phase.name == "rewrite_cuda_graph":
                return module
    raise LookupError("rewrite_cuda_graph")


def calls_of(function: Any) -> list[str]:
    """What a function calls, by name; of TVM's own wrapper what it wraps."""
    found = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call):
            name = next(getattr(expr.op, n) for n in NAMED if hasattr(expr.op, n))
            wrapped = expr.args[0] if name == "relax.call_builtin_with_ctx" else None
            found.append(str(wrapped.global_symbol) if wrapped is not None else str(name))

    relax.analysis.post_order_visit(function, visit)
    return found
