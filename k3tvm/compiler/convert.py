"""Checkpoint tensors into the arrays that kernels read: one small function per recipe.

A recipe yields the array in pieces, in order, so that a layer of experts larger than memory can be
written as it is read. Values are never rounded: bfloat16 and MXFP4 keep their bits, everything
else becomes float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from k3tvm.checkpoint import a_log
from k3tvm.errors import CheckpointError
from k3tvm.relax_models.parameters import Parameter, Recipe
from k3tvm.schedules import layouts

Array = np.ndarray[Any, Any]


class TensorSource(Protocol):
    """Where tensors come from: `k3tvm.checkpoint.Checkpoint` or a stand-in in tests."""

    def tensor(self, name: str) -> Array:
        """One tensor as stored; bfloat16 as ml_dtypes.bfloat16, MXFP4 as uint8."""


def pieces(source: TensorSource, p: Parameter) -> Iterator[Array]:
    """The parameter's array in contiguous pieces along its first axis (specification 2, 4)."""
    for piece in RECIPES[p.recipe](source, p):
        yield np.ascontiguousarray(piece)


def _vector(source: TensorSource, p: Parameter) -> Iterator[Array]:
    yield _finite(source.tensor(p.sources[0]).reshape(-1).astype(np.float32), p)


def _product(source: TensorSource, p: Parameter) -> Iterator[Array]:
    norm, proj = (source.tensor(s).reshape(-1).astype(np.float32) for s in p.sources)
    yield _finite(norm * proj, p)


def _exp_heads(source: TensorSource, p: Parameter) -> Iterator[Array]:
    name = p.sources[0]
    heads = a_log.per_head(source.tensor(name), p.rows, name)
    yield np.exp(heads.astype(np.float64)).astype(np.float32)


def _conv(source: TensorSource, p: Parameter) -> Iterator[Array]:
    filters = [source.tensor(s).astype(np.float32) for s in p.sources]
    yield np.concatenate([f.reshape(f.shape[0], -1) for f in filters]).T


def _table(source: TensorSource, p: Parameter) -> Iterator[Array]:
    yield _matrix(source, p.sources[0], p)


def _rows(source: TensorSource, p: Parameter) -> Iterator[Array]:
    yield _pack(p, np.concatenate([_matrix(source, s, p) for s in p.sources]))


def _absorb_key(source: TensorSource, p: Parameter) -> Iterator[Array]:
    key, _ = _heads(source, p)
    yield _pack(p, key.swapaxes(1, 2)).reshape(p.shape)


def _absorb_value(source: TensorSource, p: Parameter) -> Iterator[Array]:
    _, value = _heads(source, p)
    yield _pack(p, value).reshape(p.shape)


def _heads(source: TensorSource, p: Parameter) -> tuple[Array, Array]:
    """kv_b [heads * (nope + value), rank] as keys [heads, nope, rank] and values.

    `split` is nope; the number of heads follows from the shape that the kernel takes.
    """
    matrix = _matrix(source, p.sources[0], p)
    heads = p.shape[0] if len(p.shape) == 4 else 1
    per_head = matrix.reshape(heads, -1, matrix.shape[1])
    return per_head[:, : p.split], per_head[:, p.split :]


def _expert_rows(source: TensorSource, p: Parameter) -> Iterator[Array]:
    for e in range(p.experts):
        names = [s.replace("{expert}", str(e)) for s in p.sources]
        yield _pack(p, np.concatenate([_matrix(source, n, p) for n in names]))


def _zeros(source: TensorSource, p: Parameter) -> Iterator[Array]:
    yield np.zeros(p.shape, p.dtype)


RECIPES: dict[Recipe, Callable[[TensorSource, Parameter], Iterator[Array]]] = {
    "vector": _vector,
    "product": _product,
    "exp_heads": _exp_heads,
    "conv": _conv,
    "table": _table,
    "rows": _rows,
    "absorb_key": _absorb_key,
    "absorb_value": _absorb_value,
    "expert_rows": _expert_rows,
    "zeros": _zeros,
}


def _finite(vector: Array, p: Parameter) -> Array:
    """The vector, or CheckpointError: a router bias with NaN would silence an expert unnoticed."""
    if not np.isfinite(vector).all():
        raise CheckpointError(
            "has values that are not finite",
            where=" x ".join(p.sources),
            cure="the tensor is damaged, fetch its shard again",
        )
    return vector


def _matrix(source: TensorSource, stem: str, p: Parameter) -> Array:
    """One matrix in the bits of the parameter's format: float32, bfloat16 as uint16, or codes."""
    if p.fmt == "mxfp4":
        return source.tensor(f"{stem}.weight_{'packed' if p.part == 'values' else 'scale'}")
    stored = source.tensor(f"{stem}.weight")
    return stored.view(np.uint16) if p.fmt == "bfloat16" else stored.astype(np.float32)


def _pack(p: Parameter, matrix: Array) -> Array:
    if p.part == "scales":
        return layouts.pack_scales(matrix)
    return {
        "float32": layouts.pack_float32,
        "bfloat16": layouts.pack_bfloat16,
        "mxfp4": layouts.pack_mxfp4,
    }[p.fmt](matrix)
