"""Products on CUDA's tensor cores: parts of numbers, tiles of all shapes, attention (F4, F5, F11).

The tests of each operator run on the emulated device as well; here is what tensor cores add.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tvm.compiler.targets.cuda import cuda_emulated_profile
from k3tvm.relax_models.operators import Activation, ExpertLinear, Linear, MlaAttention
from k3tvm.schedules import layouts
from k3tvm.schedules.gpu import experts, linear, mla_cores
from k3tvm.schedules.gpu.products_mma_plan import Plan, Shape
from k3tvm.schedules.gpu.products_split import form_of
from k3tvm.schedules.numerics import round_to
from tests.kernels import expect, relative_error, run
from tests.tolerances import tolerance
from tests.weights import pack_codes

CUDA = cuda_emulated_profile()
ACTS = pytest.mark.parametrize("act", ["float32", "bfloat16", "float16"])
COUNT = 40  # rows of x: more than the path for few has
ONE = 127  # the scale byte of 2^0
CODE_OF_ONE = 2


def spread(act: Activation, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of all sizes from 2^-20 to 2^8, as activations of a format are."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 8, shape))
    return round_to(act, values).astype(np.float32)


def identity(op: Linear) -> dict[str, np.ndarray]:
    """A square weight that gives back x."""
    if op.fmt == "bfloat16":
        ones = np.eye(op.k, dtype=np.float32).view(np.uint32) >> 16
        return {"weight": layouts.pack_bfloat16(ones.astype(np.uint16))}
    codes = (np.eye(op.k) * CODE_OF_ONE).astype(np.uint8)
    scales = np.full((op.k, op.k // 32), ONE, np.uint8)
    packed, scale = layouts.pack_mxfp4(pack_codes(codes)), layouts.pack_scales(scales)
    return {"weight": packed, "weight_scale": scale}


@ACTS
@pytest.mark.parametrize("k", [96, 131])
def test_bfloat16_parts_are_exact(act: Activation, k: int) -> None:
    """All bits of every value come back, also where k does not fill a step."""
    op = Linear(k, k, "bfloat16", act, k)
    x = spread(act, (COUNT, k))
    np.testing.assert_array_equal(run(op, CUDA, {"x": x} | identity(op))["out"], x)


@ACTS
def test_float16_parts_lose_a_unit_of_the_last_place_at_most(act: Activation) -> None:
    """Or 2^-39 of the largest of the row, beside values 2^28 times smaller; 16 bits lose none."""
    op = Linear(96, 96, "mxfp4", act, 96)
    x = spread(act, (COUNT, 96))
    got = run(op, CUDA, {"x": x} | identity(op))["out"].astype(np.float64)
    unit = 2.0**-23 if act == "float32" else 0.0
    bound = np.abs(x) * unit + np.abs(x).max(axis=1, keepdims=True) * 2.0**-39
    assert (np.abs(got - x) <= bound).all()


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-36, 1e36])
def test_rows_at_the_ends_of_float32(size: float) -> None:
    """Scales of rows stay finite; below 2^-112 of them bits are lost, above nothing overflows."""
    op = Linear(64, 64, "mxfp4", "float32", 64)
    x = (np.ones((COUNT, 64)) * size).astype(np.float32)
    got = run(op, CUDA, {"x": x} | identity(op))["out"]
    np.testing.assert_allclose(got, x, rtol=2.0**-20, atol=2.0**-140)


@pytest.mark.parametrize("fmt", ["bfloat16", "mxfp4"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_f25_shapes_fit_their_memory(fmt: str, parts: int) -> None:
    """Every tile has room for two steps and for its results, in whole rounds."""
    shapes = [linear.CORES_LOW, linear.CORES_HIGH[parts], experts.CORES[fmt]]
    for shape in shapes[: 3 if fmt == "bfloat16" or parts < 3 else 0]:
        act: Activation = ("bfloat16", "float16", "float32")[parts - 1]
        plan = Plan(shape, fmt, form_of(fmt, 64, act), parts, CUDA.shared_bytes)
        assert plan.fits, (shape, plan)


@pytest.mark.parametrize("fmt", ["bfloat16", "mxfp4"])
def test_f5_no_shape_of_tiles_changes_a_bit(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps side by side or one below the other, one fragment of rows of x to four."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((70, 160)).astype(np.float32)
    found = []
    for i, shape in enumerate((Shape(64, 32, 1, 4), Shape(128, 64, 2, 2), Shape(128, 32, 2, 2))):
        monkeypatch.setattr(linear, "CORES_LOW", shape)
        op = Linear(160, 160, fmt, "float32", 160, exact_rows=0)
        profile = replace(CUDA, name=f"shape{i}")  # kernels are kept by the name of the profile
        weight = identity(op)
        if fmt == "bfloat16":
            bits = np.random.default_rng(2).standard_normal((160, 160)).astype(np.float32)
            raw = (bits.view(np.uint32) >> 16).astype(np.uint16)
            weight = {"weight": layouts.pack_bfloat16(raw)}
        found.append(run(op, profile, {"x": x} | weight)["out"])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def attention(act: Activation, rank: int) -> MlaAttention:
    """Widths that loads of four columns and slabs of 64 fit."""
    return MlaAttention(6, rank, 32, 4, 0.31, 6 * 40 + 8, 8, 40, act)


def attention_inputs(op: MlaAttention, seqs: list[list[int]]) -> dict[str, np.ndarray]:
    """As `tests.test_mla` has them; places of the cache that nobody sees hold NaN."""
    rng = np.random.default_rng(3)
    rows, length = sum(s[2] for s in seqs), max(s[2] + s[3] for s in seqs)
    cache = np.full((3, length + 2, op.rank + op.rope), np.nan, np.float32)
    for slot, _, count, position in seqs:
        values = rng.standard_normal((count + position, op.rank + op.rope))
        cache[slot, : count + position] = round_to(op.act, values)
    return {
        "absorbed": rng.standard_normal((rows, op.heads * op.rank), np.float32),
        "q": rng.standard_normal((rows, op.q_width), np.float32),
        "cache": cache,
        "seqs": np.array(seqs, np.int32),
    }


@pytest.mark.parametrize(
    ("act", "rank"),
    [("float32", 64), ("bfloat16", 64), ("float16", 64), ("float32", 512)],
)
def test_f5_attention_of_many_rows(
    act: Activation, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that end inside of tiles and blocks; 512 columns are shared by two workgroups."""
    monkeypatch.setattr(mla_cores, "BUSY", 0)
    op = attention(act, rank)
    given = attention_inputs(op, [[1, 0, 3, 5], [0, 3, 20, 50], [2, 23, 1, 64]])
    got, want = run(op, CUDA, given)["out"], expect(op, given)["out"]
    assert relative_error(got, want) <= tolerance("mla_attention", act)


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
def test_f6_f11_later_tokens_that_are_not_finite_change_no_earlier_row(
    act: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of zero times NaN would be NaN; rows that see infinity are not finite."""
    monkeypatch.setattr(mla_cores, "BUSY", 0)
    op = attention(act, 128)
    given = attention_inputs(op, [[2, 0, 40, 27]])
    before = run(op, CUDA, given)["out"]
    for changed, bad in ((0, np.nan), (20, np.inf), (39, -np.inf)):
        cache = given["cache"].copy()
        cache[2, 27 + changed] = bad
        after = run(op, CUDA, given | {"cache": cache})["out"]
        np.testing.assert_array_equal(after[:changed], before[:changed])
        assert not np.isfinite(after[changed:]).any()


def test_f4_experts_tiles_with_few_rows_skip_the_rest() -> None:
    """One pair, eight, nine and 32 of an expert: fragments without rows are not multiplied."""
    op = ExpertLinear(4, 1, 40, 64, "mxfp4", False, 64, 0, "float32")
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (4, 40, 64)).astype(np.uint8)
    scales = rng.integers(118, 125, (4, 40, 2)).astype(np.uint8)
    counts = [1, 8, 9, 33]
    chosen = np.repeat(np.arange(4, dtype=np.int32), counts)[:, None]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    x = rng.standard_normal((sum(counts), 64)).astype(np.float32)
    given = {
        "x": x,
        "weight": layouts.pack_mxfp4(pack_codes(codes)),
        "weight_scale": layouts.pack_scales(scales),
        "chosen": chosen,
        "first": first,
        "order": np.arange(sum(counts), dtype=np.int32)[:, None],
    }
    got, want = run(op, CUDA, given)["out"], expect(op, given)["out"]
    assert relative_error(got, want) <= tolerance("product_sum") * 10
