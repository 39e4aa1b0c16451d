"""Relax operators on a real driver against NumPy in float64, over odd shapes and all dtypes (F29).

All operators compile into one module, so that the whole sweep costs one compilation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from k3tvm._tvm import relax, tvm
from tests.tolerances import tolerance
from tests.vulkan.operators import CASES, Case
from tests.vulkan.shaders import device, target


@pytest.fixture(scope="module")
def machine() -> Any:
    """A virtual machine that has every case as a function."""
    where = device()
    builder = relax.BlockBuilder()
    for case in CASES:
        _add(builder, case)
    rules = tvm.s_tir.dlight
    with target():
        module = relax.get_pipeline("zero")(builder.get())
        module = rules.ApplyDefaultSchedule(
            rules.gpu.Matmul(),
            rules.gpu.GEMV(),
            rules.gpu.Reduction(),
            rules.gpu.GeneralReduction(),
            rules.gpu.Fallback(),
        )(module)
        executable = tvm.compile(module, target=target())
    return relax.VirtualMachine(executable, where)


def _add(builder: Any, case: Case) -> None:
    variables = [
        relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype)))
        for i, a in enumerate(case.inputs)
    ]
    with builder.function(case.name, variables):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(case.build(*variables)))
        builder.emit_func_output(result)


def test_there_are_enough_cases():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operator_agrees_with_numpy(machine, case):
    inputs = [tvm.runtime.tensor(a, device()) for a in case.inputs]
    got = machine[case.name](*inputs).numpy()
    with np.errstate(all="ignore"):
        want = case.want(*(a.astype("float64") if a.dtype.kind == "f" else a for a in case.inputs))
    assert got.shape == np.shape(want)
    if got.dtype.kind in "iub":
        assert np.array_equal(got, want)
        return
    got, want, bound = got.ravel(), np.ravel(want), tolerance(f"vulkan_{got.dtype}")
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite])
    error = np.abs(got[finite] - want[finite]).max() / np.abs(want[finite]).max()
    assert error <= bound
