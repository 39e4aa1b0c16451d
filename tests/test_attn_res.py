"""AttnRes mix kernels against their reference; exact with an empty bank; bad rows flagged."""

from __future__ import annotations

import numpy as np
import pytest

from k3tvm.relax_models.operators import AttnResNorm, BankPush, RmsNorm
from k3tvm.schedules.numerics import round_to
from tests.kernels import expect, profiles, relative_error, run
from tests.tolerances import tolerance

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
ACTS = pytest.mark.parametrize("act", ["float32", "bfloat16", "float16"])


def mix_inputs(entries: int, rows: int, width: int) -> dict[str, np.ndarray]:
    """Random sources of different sizes, with their true inverse norms."""
    rng = np.random.default_rng(1000 * entries + width)
    size = 10.0 ** rng.uniform(-2, 2, (entries, rows, 1))
    bank = (size * rng.standard_normal((entries, rows, width))).astype(np.float32)
    return {
        "bank": bank,
        "inverse_rms": (1 / np.sqrt(np.mean(bank**2.0, axis=-1) + 1e-5)).astype(np.float32),
        "stream": 3 * rng.standard_normal((rows, width), np.float32),
        "query": (2 * rng.standard_normal(width) / np.sqrt(width)).astype(np.float32),
        "weight": rng.standard_normal(width, np.float32),
        "seqs": np.array([[2, 0, rows - 1, 4], [0, rows - 1, 1, 0]], np.int32),
        "health": np.zeros((3, 4), np.int32),
    }


@PROFILES
@ACTS
@pytest.mark.parametrize(
    ("entries", "rows", "width"), [(1, 1, 1), (8, 3, 101), (19, 2, 64), (6, 2, 132)]
)
def test_mix_and_norm(profile, act, entries, rows, width):
    inputs = mix_inputs(entries, rows, width)
    op = AttnResNorm(width, entries, 1e-5, act)
    for count in sorted({0, 1, entries}):
        scalars = {"count": count, "site": 1}
        got, want = run(op, profile, inputs, scalars), expect(op, inputs, scalars)
        assert relative_error(got["out"], want["out"]) <= tolerance("attn_res_norm", act)
        assert not got["health"].any()


@PROFILES
@ACTS
def test_an_empty_bank_gives_the_stream_itself_whatever_the_bank_holds(profile, act):
    width = 75
    inputs = mix_inputs(2, 3, width)
    inputs["bank"][:] = np.nan
    inputs["query"] *= 1e4
    got = run(AttnResNorm(width, 2, 1e-5, act), profile, inputs, {"count": 0, "site": 0})["out"]
    inputs["stream"] = round_to(act, inputs["stream"].astype(np.float64)).astype(np.float32)
    rms = {"x": inputs["stream"]} | {k: inputs[k] for k in ("weight", "seqs", "health")}
    want = expect(RmsNorm(width, 1e-5, act), rms, {"site": 0})["out"]
    assert relative_error(got, want) <= tolerance("rms_norm", act)


@PROFILES
def test_the_mix_ignores_entries_that_are_not_pushed_yet(profile):
    inputs = mix_inputs(5, 2, 33)
    scalars = {"count": 3, "site": 0}
    op = AttnResNorm(33, 5, 1e-5, "float32")
    before = run(op, profile, inputs, scalars)["out"]
    inputs["bank"][3:], inputs["inverse_rms"][3:] = np.nan, np.nan
    np.testing.assert_array_equal(run(op, profile, inputs, scalars)["out"], before)


@PROFILES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_f11_a_bad_stream_row_is_flagged_for_its_slot_only(profile, bad):
    inputs = mix_inputs(2, 4, 40)
    inputs["seqs"] = np.array([[3, 0, 2, 0], [1, 2, 2, 5]], np.int32)
    inputs["stream"][2, 39] = bad
    op, scalars = AttnResNorm(40, 2, 1e-5, "float32"), {"count": 2, "site": 2}
    health = run(op, profile, inputs, scalars)["health"]
    assert np.argwhere(health).tolist() == [[2, 1]]


@PROFILES
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 37), (2, 80)])
def test_bank_push(profile, rows, width):
    rng = np.random.default_rng(width)
    inputs = {
        "stream": rng.standard_normal((rows, width), np.float32),
        "bank": rng.standard_normal((4, rows, width), np.float32),
        "inverse_rms": rng.standard_normal((4, rows), np.float32),
    }
    op = BankPush(width, 4, 1e-5)
    got, want = run(op, profile, inputs, {"count": 2}), expect(op, inputs, {"count": 2})
    np.testing.assert_array_equal(got["bank"], want["bank"])
    assert relative_error(got["inverse_rms"], want["inverse_rms"]) <= tolerance("rms_norm")
