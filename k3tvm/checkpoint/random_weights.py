"""Turns a tensor's name and role into random values like those of the released weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from k3tvm.checkpoint import mxfp4
from k3tvm.checkpoint.expected import TensorSpec

Array = np.ndarray[Any, Any]
Generator = np.random.Generator
Draw = Callable[[Generator, tuple[int, ...]], Array]
BLOCK = 1 << 22
STORED: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}


class RandomWeights:
    """Makes each tensor from the seed and its name alone, so that the order does not matter.

    With `drawn`, MXFP4 experts are uniform codes with scales that give the usual spread, which
    is much faster than encoding values; otherwise they are encoded from normal values.
    """

    def __init__(self, seed: int, heads: int, drawn: bool) -> None:
        self.seed = seed
        self.heads = heads
        self.drawn = drawn

    def make(self, spec: TensorSpec) -> Array:
        """The tensor in its published shape and dtype."""
        if spec.role.endswith((".packed", ".scale")):
            return self._expert(spec)
        draw = SPECIAL.get(spec.role) or (_near_one if _is_norm(spec) else _linear)
        generator = self._generator(spec.name)
        values: Array = np.empty(spec.shape, STORED[spec.dtypes[0]])
        for start in range(0, len(values), rows := _block_rows(spec.shape)):
            block = values[start : start + rows]
            block[...] = draw(generator, block.shape)
        if spec.role == "kda.a_log":
            values.reshape(-1)[self.heads :] = 0  # the released padding (specification 7.1)
        return values

    def _generator(self, name: str) -> Generator:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return np.random.default_rng([self.seed, int.from_bytes(digest, "little")])

    def _expert(self, spec: TensorSpec) -> Array:
        stem, _, part = spec.name.rpartition("_")
        generator = self._generator(stem)
        width = spec.shape[-1] * (2 if part == "packed" else mxfp4.GROUP)
        if self.drawn:
            generator = self._generator(spec.name)
            draw = _codes if part == "packed" else _scales
            return draw(generator, spec.shape, width)
        packed, scale = mxfp4.encode(_linear(generator, (*spec.shape[:-1], width)))
        return packed if part == "packed" else scale


def _block_rows(shape: tuple[int, ...]) -> int:
    """Rows drawn at a time, so that large tables do not exist in float32 as a whole."""
    return max(1, BLOCK // math.prod(shape[1:]))


def _codes(generator: Generator, shape: tuple[int, ...], width: int) -> Array:
    del width
    return np.frombuffer(generator.bytes(math.prod(shape)), np.uint8).reshape(shape)


def _scales(generator: Generator, shape: tuple[int, ...], width: int) -> Array:
    """Two neighbouring exponents, mixed so that uniform codes get a spread of 1/sqrt(fan-in)."""
    spread = float(np.sqrt(np.mean(mxfp4.VALUES**2)))
    exact = math.log2(1 / (math.sqrt(width) * spread))
    lower = math.floor(exact)
    share_above = (4 ** (exact - lower) - 1) / 3  # squares average to 4^exact
    above = generator.random(shape) < share_above
    return (mxfp4.SCALE_BIAS + lower + above).astype(np.uint8)


def _linear(generator: Generator, shape: tuple[int, ...]) -> Array:
    """Normal values that keep the size of a unit input: spread 1/sqrt(fan-in)."""
    return generator.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1]))


def _near_one(generator: Generator, shape: tuple[int, ...]) -> Array:
    return 1 + np.float32(0.1) * generator.standard_normal(shape, np.float32)


def _normal(spread: float) -> Draw:
    return lambda generator, shape: (
        np.float32(spread) * generator.standard_normal(shape, np.float32)
    )


def _uniform(low: float, high: float) -> Draw:
    return lambda generator, shape: generator.uniform(low, high, shape)


def _is_norm(spec: TensorSpec) -> bool:
    return len(spec.shape) == 1 and "norm" in spec.role


# Spreads are chosen so that every part of the model matters: gates are neither shut nor
# saturated, the selection bias changes the order of the experts, and decays fill their range.
SPECIAL: dict[str, Draw] = {
    "embedding": _normal(1.0),
    "kda.a_log": _uniform(-0.5, 1.0),
    "kda.dt_bias": _uniform(-7.0, 3.0),
    "kda.q_conv": _normal(0.5),
    "kda.k_conv": _normal(0.5),
    "kda.v_conv": _normal(0.5),
    "router.bias": _normal(0.2),
}
