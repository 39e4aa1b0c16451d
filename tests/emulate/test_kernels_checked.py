"""Kernels at odd sizes under the checks of test_checked: no access past an array, and no race.

Past the end of an array there is often another one, whose values are multiplied by zero: results
are right, and only a check of every access can tell.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from k3tvm.compiler.targets import profile_of
from k3tvm.emulate.build import CHECK
from k3tvm.relax_models.operators import KdaChunk, KdaStep, Linear
from k3tvm.schedules.profile import GpuProfile
from tests import test_experts as experts
from tests import test_kda as kda
from tests import test_linear as linear
from tests import test_mla as mla
from tests.kernels import compiled, run

TARGETS = pytest.mark.parametrize("target", ["cuda-emulated", "metal-emulated"])


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of these tests are compiled with checks, and are not kept for others."""
    monkeypatch.setenv(CHECK, "1")
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def gpu(target: str) -> GpuProfile:
    profile = profile_of(target)
    assert isinstance(profile, GpuProfile)
    return profile


@TARGETS
@pytest.mark.parametrize(
    ("fmt", "k"), [("bfloat16", 31), ("bfloat16", 70), ("mxfp4", 96), ("float32", 33)]
)
def test_linear(target: str, fmt: linear.WeightFormat, k: int) -> None:
    """One row, a few, and more than a tile; the last block of weight rows is not full."""
    op: Linear = linear.operator(fmt, 43, k, 1, 1)
    weight = linear.weight_of(op)
    for rows in (1, 3, 9, 35):
        assert np.isfinite(run(op, gpu(target), linear.inputs(op, rows, weight, rows))["out"]).all()


@TARGETS
def test_experts(target: str) -> None:
    """A pair alone, some for each expert, and tiles."""
    op = experts.operator("mxfp4", 5, 2, 39, 64, True)
    weight = experts.weight_of(op)
    for rows in (1, 4, 30):
        chosen = experts.choices(np.random.default_rng(rows), op, rows)
        given = experts.inputs(op, weight, chosen)
        assert np.isfinite(run(op, gpu(target), given)["out"]).all()


@TARGETS
@pytest.mark.parametrize(("form", "k", "w"), [(KdaChunk, 64, 48), (KdaStep, 37, 53)])
def test_kda(target: str, form: kda.Form, k: int, w: int) -> None:
    op = form(1, k, w, "float32")
    rows = 21 if form is KdaChunk else 1
    given = kda.inputs_of(op, [(1, 0, rows, 0)])
    assert np.isfinite(run(op, gpu(target), given)["out"]).all()


@TARGETS
@pytest.mark.parametrize("rows", [1, 9])
def test_latent_attention(target: str, rows: int) -> None:
    op = mla.attention_op(3, 64, 9, "float32")
    given = mla.attention_inputs(op, [[0, 0, rows, 70]], 1)
    assert np.isfinite(run(op, gpu(target), given)["out"]).all()
