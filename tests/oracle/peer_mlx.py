"""Turns a checkpoint folder and ids into logits through mlx-lm on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from torch import Tensor


def load(folder: Path) -> Any:
    """The peer's model with the folder's weights; MXFP4 stays packed, all else float32."""
    mx.set_default_device(mx.cpu)
    model, _ = load_model(folder, strict=True)
    model.set_dtype(mx.float32)
    return model


def logits(model: Any, ids: list[int], first: int) -> Tensor:
    """Logits [n, vocab]: a prompt of `first` tokens, then the others one by one with its cache."""
    cache = make_prompt_cache(model)
    pieces = [ids[:first], *([token] for token in ids[first:])]
    parts = [np.array(model(mx.array([piece]), cache)[0]) for piece in pieces]
    return torch.from_numpy(np.concatenate(parts)).double()
