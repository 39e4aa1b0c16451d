"""Which products of few rows CUDA's tensor cores make, and how."""

from __future__ import annotations

from k3tvm.relax_models.operators import Activation, WeightFormat
from k3tvm.schedules.gpu.products_few_bf16 import few_bf16
from k3tvm.schedules.gpu.products_few_mma import few_mxfp4
from k3tvm.schedules.gpu.products_few_strip import MOST_WARPS, WARP, FewOnCores
from k3tvm.schedules.gpu.products_split import form_of
from k3tvm.schedules.profile import GpuProfile


def few_on_cores(
    p: GpuProfile, fmt: WeightFormat, k: int, act: Activation, exact: bool = False
) -> FewOnCores | None:
    """How a device makes products of few rows with weights of width k; None: not in this way.

    exact: products stay float32 whatever `act` is.
    """
    if "tensor_core" not in p.features or p.threads < WARP * MOST_WARPS or fmt == "float32":
        return None
    return few_mxfp4(k) if fmt == "mxfp4" else few_bf16(form_of(fmt, k, act, exact))
