"""Turns the three stored forms of A_log into one value per head (specification 7.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3tvm.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np


def fits(shape: tuple[int, ...], heads: int) -> bool:
    """Whether the shape is [heads], a longer [n] with a padded tail, or [1, 1, heads, 1]."""
    return (len(shape) == 1 and shape[0] >= heads) or shape == (1, 1, heads, 1)


def per_head(stored: np.ndarray[Any, Any], heads: int, name: str) -> np.ndarray[Any, Any]:
    """Float32 [heads] from a stored A_log; a tail that is not all zero is a CheckpointError.

    A tail with values means that the tensor is not per head, and reading its first part would
    give fluent garbage.
    """
    flat = stored.reshape(-1).astype("float32")
    if not fits(stored.shape, heads):
        raise CheckpointError(f"shape {list(stored.shape)} is not for {heads} heads", where=name)
    if flat[heads:].any():
        raise CheckpointError(
            f"values beyond the {heads} heads are not zero, so this is not one value per head",
            where=name,
            cure="check 'num_heads' in 'linear_attn_config'",
        )
    return flat[:heads]
