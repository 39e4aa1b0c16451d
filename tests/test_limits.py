"""Sizes beyond what others compiled in: 896 experts, 2^31 elements, 4 GiB (F22)."""

from __future__ import annotations

import numpy as np

from k3tvm.relax_models.operators import ExpertLinear
from k3tvm.runtime.memory import share, zeros
from k3tvm.schedules import layouts
from k3tvm.schedules.numerics import mxfp4_values
from tests.kernels import compiled, host_profiles


def test_f22_an_expert_beyond_4_gib_of_a_tensor_of_k3_is_found():
    """The gate and up matrices of K3's experts: 9.9 GB, of which one expert is really there."""
    experts, rows, k, expert = 896, 2 * 3072, 3584, 893
    op = ExpertLinear(experts, 1, rows, k, "mxfp4", False, k, 0, "float32")
    weight, scale = (zeros(tuple(int(d) for d in a.shape), a.dtype) for a in op.arguments()[1:3])
    assert weight[:expert].nbytes > 2**33 and weight.size > 2**31
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (rows, k // 2)).astype(np.uint8)
    scales = rng.integers(118, 125, (rows, k // 32)).astype(np.uint8)
    weight[expert], scale[expert] = layouts.pack_mxfp4(codes), layouts.pack_scales(scales)
    x, out = zeros((1, k), "float32"), zeros((1, rows), "float32")
    x[:] = rng.standard_normal(k)
    chosen, order, first = (zeros(s, "int32") for s in ((1, 1), (1, 1), (experts + 1,)))
    chosen[:], first[expert + 1 :] = expert, 1
    args = [share(a) for a in (x, weight, scale, chosen, first, order, out)]
    want = mxfp4_values(codes, scales) @ x[0].astype(np.float64)
    for profile in host_profiles():
        out[:] = np.nan
        compiled(op, profile)(*args)
        assert np.abs(out[0] - want).max() <= 1e-5 * np.abs(want).max()
