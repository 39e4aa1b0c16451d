"""Turns checkpoint tensors (numpy or torch, by published name) into torch tensors of one type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from k3tvm.errors import CheckpointError

Array = Tensor | np.ndarray
Cast = Callable[[Tensor], Tensor]

# E2M1, codes 0..15 (specification 4); code 8 is minus zero.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_GROUP = 32
# Converted tensors are kept up to this many bytes, beyond it they are converted at each use.
CACHE_BYTES = 4 << 30


def exact(x: Tensor) -> Tensor:
    """The rounding hook of an unrounded run: leaves `x` alone."""
    return x


def round_bfloat16(x: Tensor) -> Tensor:
    """The rounding hook of the official BF16 run (specification 3.6b): nearest even, type kept."""
    return x.to(torch.bfloat16).to(x.dtype)


def round_float16(x: Tensor) -> Tensor:
    """The same points rounded to float16; values beyond 65504 become infinite."""
    return x.to(torch.float16).to(x.dtype)


def as_torch(value: Array) -> Tensor:
    """A torch tensor with the same bits; one-byte floats (E8M0 scales) become uint8."""
    if isinstance(value, Tensor):
        return value.view(torch.uint8) if value.dtype == torch.float8_e8m0fnu else value
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(value.view(np.uint16))).view(torch.bfloat16)
    if value.dtype.name == "float8_e8m0fnu":
        value = value.view(np.uint8)
    # A copy, because torch refuses to promise that it never writes to a read-only file mapping.
    return torch.from_numpy(np.array(value))


def decode_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 `packed` u8 [N, K/2] and `scale` u8 [N, K/32] to [N, K] (specification 4).

    The low nibble is the even element. Scale 255 is NaN in the format and is refused.
    """
    if bool((scale == 255).any()):
        raise CheckpointError(
            "MXFP4 scale byte 255 is not a number",
            where="weight_scale",
            cure="the tensor is damaged, fetch its shard again",
        )
    byte = torch.arange(256)
    pairs = torch.tensor(E2M1, dtype=dtype)[torch.stack((byte & 15, byte >> 4), dim=1)]
    groups = pairs[packed.int()].reshape(len(packed), -1, MXFP4_GROUP)
    factors = torch.exp2(scale.double() - 127).to(dtype)
    return groups.mul_(factors[..., None]).flatten(1)


@dataclass
class Cache:
    """Converted tensors by full name, bounded by `CACHE_BYTES`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    used: int = 0

    def get(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor `name`, made by `make` when it is not kept."""
        found = self.tensors.get(name)
        if found is not None:
            return found
        made = make()
        if self.used + made.nbytes <= CACHE_BYTES:
            self.tensors[name] = made
            self.used += made.nbytes
        return made


@dataclass(frozen=True)
class Weights:
    """The tensors below one name prefix, read in `dtype`; `cast` rounds activations."""

    tensors: Mapping[str, Array]
    dtype: torch.dtype
    cast: Cast
    prefix: str = ""
    cache: Cache = field(default_factory=Cache)

    def at(self, name: str) -> Weights:
        """The same tensors seen from `name.` downwards."""
        return Weights(self.tensors, self.dtype, self.cast, f"{self.prefix}{name}.", self.cache)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self.prefix + name in self.tensors

    def raw(self, name: str) -> Array:
        """The stored tensor; CheckpointError when it is missing."""
        try:
            return self.tensors[self.prefix + name]
        except KeyError:
            raise CheckpointError(
                "tensor is missing",
                where=self.prefix + name,
                cure="the weights do not fit config.json, run `k3tvm inspect` on the folder",
            ) from None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name` in `dtype`; CheckpointError unless it has this shape."""
        found = self.cache.get(self.prefix + name, lambda: as_torch(self.raw(name)).to(self.dtype))
        return self._shaped(found, name, shape)

    def matrix(self, name: str, *shape: int) -> Tensor:
        """The matrix `name.weight` [out, in], decoded when it is stored as MXFP4."""
        if not self.has(f"{name}.weight_packed"):
            return self.tensor(f"{name}.weight", *shape)
        found = self.cache.get(f"{self.prefix}{name}.weight", lambda: self._decoded(name))
        return self._shaped(found, name, shape)

    def linear(self, x: Tensor, name: str, width: int) -> Tensor:
        """x [n, in] to [n, width] through `name.weight` [width, in]; no bias anywhere."""
        return self.cast(x @ self.cast(self.matrix(name, width, x.shape[-1])).T)

    def _decoded(self, name: str) -> Tensor:
        packed, scale = (
            as_torch(self.raw(f"{name}.weight_{part}")).view(torch.uint8)
            for part in ("packed", "scale")
        )
        if packed.shape[1] * 2 != scale.shape[1] * MXFP4_GROUP:
            raise CheckpointError(
                f"weight_packed {tuple(packed.shape)} does not fit weight_scale "
                f"{tuple(scale.shape)} in groups of {MXFP4_GROUP}",
                where=self.prefix + name,
                cure="fetch the shard again",
            )
        return decode_mxfp4(packed, scale, self.dtype)

    def _shaped(self, found: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        if tuple(found.shape) != shape:
            raise CheckpointError(
                f"shape is {tuple(found.shape)}, the configuration asks for {shape}",
                where=self.prefix + name,
                cure="use the config.json that belongs to these weights",
            )
        return found
