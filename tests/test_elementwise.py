"""Embedding, last-row, gated-activation and expert-sum kernels against their references."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import Embed, ExpertCombine, Glu, LastRows
from tests.kernels import expect, profiles, relative_error, run
from tests.tolerances import tolerance

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
ACTS = pytest.mark.parametrize("act", ["float32", "bfloat16", "float16"])


@PROFILES
@pytest.mark.parametrize("width", [1, 37, 64, 1061])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
def test_embed_copies_rows_bit_for_bit(profile, fmt, width):
    rng = np.random.default_rng(width)
    table = rng.standard_normal((11, width), np.float32)
    if fmt == "bfloat16":
        table = (table.view(np.uint32) >> 16).astype(np.uint16)
    inputs = {"ids": np.array([10, 0, 3, 3, 7], np.int32), "table": table}
    op = Embed(11, width, fmt)
    np.testing.assert_array_equal(run(op, profile, inputs)["out"], expect(op, inputs)["out"])


@PROFILES
@pytest.mark.parametrize("width", [1, 4, 37, 530])
def test_f5_last_rows_belong_to_their_own_sequence(profile, width):
    x = np.random.default_rng(width).standard_normal((9, width), np.float32)
    seqs = np.array([[2, 0, 1, 7], [0, 1, 5, 0], [1, 6, 3, 2]], np.int32)
    op = LastRows(width)
    np.testing.assert_array_equal(run(op, profile, {"x": x, "seqs": seqs})["out"], x[[0, 5, 8]])


GLUS = [("silu", 1.0, None), ("situ", 4.0, 25.0), ("situ", 3.0, None)]


@PROFILES
@ACTS
@pytest.mark.parametrize(("kind", "beta", "linear_beta"), GLUS)
@pytest.mark.parametrize(
    ("rows", "width", "parts", "offset", "more"),
    [(1, 1, 1, 0, 3), (3, 37, 3, 5, 3), (2, 36, 2, 8, 4)],
)
def test_glu(profile, act, kind, beta, linear_beta, rows, width, parts, offset, more):
    rng = np.random.default_rng(width)
    x_width = offset + 2 * parts * width + more
    inputs = {"x": 9 * rng.standard_normal((rows, x_width), np.float32)}
    op = Glu(width, parts, x_width, offset, kind, beta, linear_beta, act)
    got, want = run(op, profile, inputs)["out"], expect(op, inputs)["out"]
    assert relative_error(got, want) <= tolerance("glu", act)


@PROFILES
@pytest.mark.parametrize(("kind", "beta", "linear_beta"), GLUS)
def test_glu_is_relatively_exact_from_tiny_to_huge_values(profile, kind, beta, linear_beta):
    size = np.logspace(-12, 1.8, 540).astype(np.float32)
    x = np.stack([np.concatenate([g * size, u * size]) for g in (1, -1) for u in (1, -1)])
    op = Glu(540, 1, 1080, 0, kind, beta, linear_beta, "float32")
    inputs = {"x": x.astype(np.float32)}
    got, want = run(op, profile, inputs)["out"], expect(op, inputs)["out"]
    assert (np.abs(got - want) <= tolerance("glu") * np.abs(want)).all()


@PROFILES
@ACTS
@pytest.mark.parametrize(("norm", "addends"), [(False, 0), (False, 2), (True, 0), (True, 1)])
@pytest.mark.parametrize(
    ("rows", "top_k", "width"), [(1, 1, 1), (3, 5, 37), (2, 16, 601), (2, 3, 132)]
)
def test_expert_combine(profile, act, norm, addends, rows, top_k, width):
    rng = np.random.default_rng(rows + width)
    inputs = {
        "y": rng.standard_normal((rows, top_k * width), np.float32),
        "weights": rng.uniform(0.01, 1, (rows, top_k)).astype(np.float32),
        "norm_weight": rng.standard_normal(width if norm else 1, np.float32),
    }
    for i in range(addends):
        inputs[f"addend{i}"] = rng.standard_normal((rows, width), np.float32)
    op = ExpertCombine(top_k, width, norm, 1e-5, addends, act)
    got, want = run(op, profile, inputs)["out"], expect(op, inputs)["out"]
    assert relative_error(got, want) <= tolerance("expert_combine", act)
