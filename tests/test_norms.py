"""RMSNorm kernels against their reference; rows that are not finite are flagged (F11)."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import RmsNorm
from tests.kernels import expect, profiles, relative_error, run
from tests.tolerances import tolerance


@pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
@pytest.mark.parametrize("act", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 37), (2, 64), (5, 100), (2, 1000)])
def test_rms_norm(profile, act, rows, width):
    rng = np.random.default_rng(rows * 1000 + width)
    inputs = {
        "x": rng.standard_normal((rows, width), np.float32),
        "weight": rng.standard_normal(width, np.float32),
        "seqs": np.array([[1, 0, rows, 0]], np.int32),
        "health": np.zeros((3, 2), np.int32),
    }
    op = RmsNorm(width, 1e-5, act)
    got, want = run(op, profile, inputs, {"site": 2}), expect(op, inputs, {"site": 2})
    assert relative_error(got["out"], want["out"]) <= tolerance("rms_norm", act)
    assert not got["health"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_f11_rows_that_are_not_finite_are_flagged_for_their_slot_only(bad):
    x = np.ones((4, 20), np.float32)
    x[2, 7] = bad
    inputs = {
        "x": x,
        "weight": np.ones(20, np.float32),
        "seqs": np.array([[2, 0, 2, 0], [1, 2, 2, 5]], np.int32),
        "health": np.zeros((3, 4), np.int32),
    }
    op = RmsNorm(20, 1e-5, "float32")
    for profile in profiles():
        got = run(op, profile, inputs, {"site": 1})
        assert np.argwhere(got["health"]).tolist() == [[1, 1]]
        np.testing.assert_array_equal(got["health"], expect(op, inputs, {"site": 1})["health"])
