"""F: a report that claims what kernels do not do. Traffic by hand, and against an oracle."""

from __future__ import annotations

from typing import Any

import pytest

from k3tvm.bundle.kernels import Point
from k3tvm.compiler.targets.cuda import cuda_profile
from k3tvm.compiler.targets.metal import metal_profile
from k3tvm.compiler.targets.vulkan import vulkan_profile
from k3tvm.relax_models.operators import (
    BankPush,
    Embed,
    ExpertLinear,
    GatedRmsNorm,
    Glu,
    KdaGate,
    KdaStep,
    LastRows,
    Linear,
    MlaAttention,
    Operator,
    RmsNorm,
    ShortConv,
    SigmoidGate,
)
from k3tvm.report.minimum import minimum
from k3tvm.report.points import integers, scalars, symbols
from k3tvm.report.traffic import LaunchTraffic, traffic_of
from k3tvm.schedules.registry import select
from tests.report.thread_by_thread import execute

ONE = Point("one", 1, 1, 4095)
FEW = Point("few", 4, 4, 7)
MANY = Point("many", 70, 2, 0)
PROFILES = {
    "cuda": cuda_profile("sm_80"),
    "metal": metal_profile(),
    "vulkan": vulkan_profile("baseline"),
}


def launches(op: Operator, point: Point, profile: str = "cuda") -> list[LaunchTraffic]:
    return traffic_of(select(op, PROFILES[profile]), point)


def total(found: list[LaunchTraffic], name: str) -> int:
    return sum(getattr(one.traffic, name) for one in found)


ORACLE: list[tuple[Operator, Point]] = [
    (LastRows(40), FEW),
    (Embed(50, 24, "bfloat16"), FEW),
    (BankPush(48, 3, 1e-5), FEW),
    (ShortConv(20, 4, 24, "float32"), FEW),
    (KdaGate(2, 16, -5.0, 40, 36), FEW),
    (GatedRmsNorm(2, 16, 1e-5, 70, 32, "float32"), FEW),
    (Glu(24, 2, 100, 0, "situ", 4.0, 25.0, "bfloat16"), FEW),
    (Linear(33, 40, "bfloat16", "float32", 48, x_offset=4), ONE),
    (Linear(20, 24, "float32", "float32", 24, addends=1), FEW),
    (Linear(40, 64, "mxfp4", "float32", 64), FEW),
    (Linear(16, 8, "bfloat16", "float32", 40, groups=3, x_stride=12), ONE),
    (KdaStep(2, 16, 16, "float32"), FEW),
    (SigmoidGate(24, 60, 30, "float32"), FEW),
]


@pytest.mark.parametrize("op, point", ORACLE, ids=lambda x: getattr(x, "key", x))
def test_agrees_with_executing_every_thread(op, point):
    """Each element that a thread touches is counted, and none that no thread touches."""
    kernel = select(op, PROFILES["vulkan"])
    sizes = symbols(point) | scalars(op)
    known: dict[Any, int] = {}
    for p in kernel.func.params:
        if str(p.name) in scalars(op):
            known[p] = sizes[str(p.name)]
        else:
            known |= {d: sizes[str(d.name)] for d in p.shape if hasattr(d, "name")}
    tensors = {p: str(p.name) for p in kernel.func.params if p not in known}
    width = {str(p.name): _bytes(str(p.dtype)) for p in tensors}
    threads = execute(kernel.func.body, known, tensors, integers(op, point))
    loads = {place for t in threads for place in t.loads}
    stores = {place for t in threads for place in t.stores}
    every = [c for t in threads for c in (t.loads, t.stores)]
    found = traffic_of(kernel, point)
    bound = {"health"} & set(width.keys())  # flags depend on numbers
    assert total(found, "read_bytes") == sum(width[n] for n, _ in loads)
    assert total(found, "written_bytes") == sum(width[n] for n, _ in stores if n not in bound)
    assert total(found, "requested_bytes") == sum(
        width[n] * k for c in every for (n, _), k in c.items()
    )
    assert all(one.traffic.exact for one in found)


def _bytes(dtype: str) -> int:
    return {"uint8": 1, "uint16": 2}.get(dtype, 4)


def test_norm_by_hand():
    """x and the weight once, the result once; a flag at most for each row."""
    width, n = 512, FEW.rows
    (one,) = launches(RmsNorm(width, 1e-5, "float32"), FEW)
    assert one.traffic.read_bytes in range(4 * width * (n + 1), 4 * width * (n + 1) + 16 * n + 1)
    assert 0 <= one.traffic.written_bytes - 4 * width * n <= 4 * n
    assert one.traffic.group_bytes >= one.traffic.read_bytes + (n - 1) * 4 * width


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "mxfp4"])
def test_product_with_one_row_reads_the_weight_once(fmt, profile):
    """Weight, x, result; and each weight takes a multiplication and an addition."""
    rows, k = 320, 256
    op = Linear(rows, k, fmt, "float32", k)
    found = launches(op, ONE, profile)
    bits = {"float32": 32, "bfloat16": 16, "mxfp4": 4.25}[fmt]
    need = minimum(op, ONE)
    assert need.read_bytes == rows * k * bits / 8 + 4 * k
    assert need.written_bytes == 4 * rows
    prepared = len(found) > 1  # x in another form, for tensor cores
    assert 0 <= total(found, "read_bytes") - need.read_bytes <= 8 * k * prepared
    assert 0 <= total(found, "written_bytes") - need.written_bytes <= 8 * k * prepared
    assert total(found, "flops") + total(found, "matrix_flops") >= 2 * rows * k


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("point", [ONE, FEW], ids=["one", "few"])
def test_recurrent_state_goes_in_and_out_once(point, profile):
    op = KdaStep(4, 128, 128, "float32")
    found = launches(op, point, profile)
    state = point.sequences * 4 * 128 * 128 * 4
    small = point.rows * 4 * (3 * 128 + 128 + 1) * 4 + point.sequences * 12
    assert total(found, "read_bytes") == state + small
    assert total(found, "written_bytes") == state + point.rows * 4 * 128 * 4


def test_only_chosen_experts_are_read():
    op = ExpertLinear(64, 4, 96, 128, "mxfp4", False, 128, 0, "float32")
    found = launches(op, ONE, "vulkan")
    weights = 4 * 96 * 128 * 4.25 / 8
    assert 0 <= total(found, "read_bytes") - (weights + 128 * 4) <= 64
    assert total(found, "written_bytes") == 4 * 4 * 96


def test_latent_cache_is_read_to_the_last_token():
    op = MlaAttention(16, 64, 16, 16, 0.1, 16 * 32, 0, 32, "float32")
    need = minimum(op, ONE)
    cache = 4096 * 80 * 4
    assert need.read_bytes == cache + 4 * 16 * (64 + 16)
    assert total(launches(op, ONE), "read_bytes") >= cache


@pytest.mark.parametrize("profile", PROFILES)
def test_tiles_of_many_rows_read_no_more_than_there_is(profile):
    """Every weight and every row of x at least once, and requests grow with the tiles."""
    op = Linear(192, 128, "bfloat16", "float32", 128)
    found = launches(op, MANY, profile)
    assert total(found, "written_bytes") >= MANY.rows * 192 * 4
    assert total(found, "read_bytes") >= 192 * 128 * 2 + MANY.rows * 128 * 4
    assert total(found, "requested_bytes") >= total(found, "read_bytes")
    assert total(found, "flops") + total(found, "matrix_flops") >= 2 * MANY.rows * 192 * 128
    assert not any("function" in note for one in found for note in one.notes)
