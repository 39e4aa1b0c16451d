"""GPU kernels with more rows than a grid has workgroups in one dimension (65535)."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import (
    AttnResNorm,
    BankPush,
    Embed,
    ExpertCombine,
    Glu,
    LastRows,
    MlaCache,
    Operator,
    Router,
    SigmoidGate,
)
from tests.kernels import expect, gpu_profiles, relative_error, run
from tests.tolerances import tolerance

ROWS = 65536 + 4465
OPERATORS: dict[str, Operator] = {
    "glu": Glu(3, 1, 7, 1, "situ", 4.0, 25.0, "float32"),
    "sigmoid_gate": SigmoidGate(4, 8, 4, "float32"),
    "expert_combine": ExpertCombine(2, 3, True, 1e-5, 1, "float32"),
    "attn_res_norm": AttnResNorm(5, 2, 1e-5, "float32"),
    "rms_norm": BankPush(4, 1, 1e-5),
    "router": Router(6, 2, 1, 1, True, 1.0, 6),
}


def random_inputs(op: Operator, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Normal floats; one sequence in slot 0; integers are zero."""
    rng, inputs = np.random.default_rng(4), {}
    for a in op.arguments():
        shape = [sizes.get(d, d) if isinstance(d, str) else d for d in a.shape]
        if a.role != "out":
            normal = a.dtype == "float32"
            array = rng.standard_normal(shape, np.float32) if normal else np.zeros(shape, a.dtype)
            inputs[a.name] = array
    if "seqs" in inputs:
        inputs["seqs"][0] = (0, 0, sizes["n"], 0)
    return inputs


@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
@pytest.mark.parametrize("name", OPERATORS)
def test_more_rows_than_workgroups_in_one_dimension(profile, name):
    op = OPERATORS[name]
    inputs = random_inputs(op, {"n": ROWS, "m": 1, "sites": 1, "slots": 1})
    if name == "router":  # apart, so that both precisions order them alike
        inputs["x"] = np.random.default_rng(1).permuted(
            np.tile(np.linspace(-3, 3, 6, dtype=np.float32), (ROWS, 1)), axis=1
        )
    scalars = {s: {"count": 0, "site": 0}[s] for s in op.scalars}
    got, want = run(op, profile, inputs, scalars), expect(op, inputs, scalars)
    for key in want:
        assert relative_error(got[key], want[key]) <= tolerance(name)


@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
def test_copies_of_more_rows_than_workgroups_in_one_dimension(profile):
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 9, ROWS).astype(np.int32)
    table = rng.standard_normal((9, 5), np.float32)
    got = run(Embed(9, 5, "float32"), profile, {"ids": ids, "table": table})["out"]
    np.testing.assert_array_equal(got, table[ids])
    seqs = np.zeros((ROWS, 4), np.int32)
    seqs[:, 1], seqs[:, 2] = np.arange(ROWS), 1
    last = run(LastRows(5), profile, {"x": got, "seqs": seqs[::-1].copy()})["out"]
    np.testing.assert_array_equal(last, got[::-1])


@pytest.mark.parametrize("profile", gpu_profiles(), ids=lambda p: p.name)
def test_cache_rows_of_more_tokens_than_workgroups_in_one_dimension(profile):
    op = MlaCache(3, 4, 1, 1e-6, 8, 5, 0, "float32")
    inputs = random_inputs(op, {"n": ROWS, "m": 2, "slots": 2, "cap": ROWS})
    inputs["seqs"][:] = [(1, 0, ROWS - 7, 2), (0, ROWS - 7, 7, 0)]
    got, want = run(op, profile, inputs), expect(op, inputs)
    for key in ("cache", "query"):
        assert relative_error(got[key], want[key]) <= tolerance("rms_norm")
