"""RMSNorm of the residual stream, with a flag for rows that are not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from k3tvm._tvm import T
from k3tvm.relax_models.operators import RmsNorm
from k3tvm.schedules import vector as v
from k3tvm.schedules.numerics import round_to
from k3tvm.schedules.profile import CpuProfile
from k3tvm.schedules.registry import reference, schedule


def flag_rows(seqs: np.ndarray, bad: np.ndarray, site: int, health: np.ndarray) -> np.ndarray:
    """Reference of `flag_row`: health with [site, slot] = 1 for the slots of the bad rows."""
    health = health.copy()
    for slot, first, rows, _ in seqs:
        if bad[first : first + rows].any():
            health[site, slot] = 1
    return health


def flag_row(a: SimpleNamespace, row: Any, mean_square: Any) -> None:
    """Set health[site, slot of row] when the mean square of a row is not finite (it is rare)."""
    # By its bits: TVM turns not (x < infinity) into infinity <= x, which is false for NaN.
    exponent = T.bitwise_and(v.bits(mean_square, "uint32", 1), T.uint32(0x7F800000))
    with T.If(exponent == T.uint32(0x7F800000)), T.Then(), v.serial(a.m) as s:
        first = v.cast(a.seqs[s, v.int64(1)], "int64", 1)
        rows = v.cast(a.seqs[s, v.int64(2)], "int64", 1)
        with T.If(T.And(row >= first, row < first + rows)), T.Then():
            slot = v.cast(a.seqs[s, v.int64(0)], "int64", 1)
            v.store(a.health, T.int32(1), a.site, slot, lanes=1)


def mean_square(profile: CpuProfile, x: Any, row: Any, width: int) -> Any:
    """mean(x[row]^2) in float32: 16 running sums, then their pairwise sum."""
    acc = v.scratch(v.LANES)
    v.store(acc, v.splat(0.0), 0)
    whole = width // v.LANES
    with v.serial(whole) as i:
        xi = v.let(v.load(x, row, i * v.LANES))
        v.store(acc, v.fma(profile, xi, xi, v.load(acc, 0)), 0)
    total = v.reduce_add(v.load(acc, 0))
    for at, lanes in v.chunks(width - whole * v.LANES):
        xi = v.let(v.load(x, row, whole * v.LANES + at, lanes=lanes))
        total = total + v.reduce_add(v.let(xi * xi), lanes)
    return v.let(total * T.float32(1.0 / width))


@reference(RmsNorm)
def rms_norm_reference(op: RmsNorm, args: Any) -> dict[str, np.ndarray]:
    """weight * round(x / sqrt(mean(x^2) + eps)), rounded."""
    x = args.x.astype(np.float64)
    ms = np.mean(x * x, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinity over infinity is the NaN that is wanted
        out = round_to(op.act, args.weight * round_to(op.act, x / np.sqrt(ms + op.eps)))
    bad = ~np.isfinite(ms[:, 0])
    return {"out": out, "health": flag_rows(args.seqs, bad, args.site, args.health)}


@schedule(RmsNorm, "cpu", "rows in parallel, 16 lanes along the width")
def rms_norm_cpu(op: RmsNorm, p: CpuProfile, a: SimpleNamespace) -> None:
    """One row per iteration: mean square, then scale."""
    with v.parallel(a.n) as row:
        ms = mean_square(p, a.x, row, op.width)
        flag_row(a, row, ms)
        scale = v.let(T.float32(1.0) / v.float_intrinsic("sqrt", 1, ms + T.float32(op.eps)))
        normalise(op, a.x, a.weight, a.out, row, scale)


def normalise(op: Any, x: Any, weight: Any, out: Any, row: Any, scale: Any) -> None:
    """out[row] = weight * round(x[row] * scale), rounded."""
    whole = op.width // v.LANES

    def piece(at: Any, lanes: int) -> None:
        unit = v.rounded(op.act, v.load(x, row, at, lanes=lanes) * v.splat(scale, lanes), lanes)
        value = v.rounded(op.act, v.load(weight, at, lanes=lanes) * unit, lanes)
        v.store(out, value, row, at, lanes=lanes)

    with v.serial(whole) as i:
        piece(i * v.LANES, v.LANES)
    for at, lanes in v.chunks(op.width - whole * v.LANES):
        piece(whole * v.LANES + at, lanes)
