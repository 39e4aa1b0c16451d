"""Turns a Kimi-Linear checkpoint folder and ids into logits through transformers, in float64."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

SOURCE = "transformers.models.kimi_linear.modeling_kimi_linear"


def hide_test_folder() -> None:
    """Takes tests/ off the import path, where pytest puts it.

    Else tests/kernels.py poses as the package `kernels`, which the peer imports when it is there.
    """
    tests = Path(__file__).resolve().parent.parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != tests]


@functools.cache
def in_double() -> ModuleType:
    """The peer's module with its float32 islands made float64, in memory only.

    Its own float32 steps would hide differences below 1e-7; nothing else of it is changed.
    """
    hide_test_folder()
    spec = importlib.util.find_spec(SOURCE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{SOURCE}: install the `oracle` extra")
    text = Path(spec.origin).read_text()
    text = re.sub(r"torch\.float32|torch\.float\b", "torch.float64", text)
    text = text.replace(".float()", ".double()")
    module = ModuleType(SOURCE)
    module.__package__, module.__file__ = SOURCE.rpartition(".")[0], spec.origin
    # Class decorators of the peer look their module up by name while it is being executed.
    sys.modules[SOURCE] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), vars(module))
    return module


def load(folder: Path) -> torch.nn.Module:
    """The peer's model with the folder's weights, float64; every tensor must have found a place."""
    model, report = in_double().KimiLinearForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    left = {key: names for key, names in report.items() if names}
    if left:
        raise ValueError(f"the peer did not load everything: {left}")
    return model.double().eval()


@torch.no_grad()
def logits(model: torch.nn.Module, ids: list[int], first: int) -> Tensor:
    """Logits [n, vocab]: a prompt of `first` tokens, then the others one by one with its cache."""
    out = model(torch.tensor([ids[:first]]), use_cache=True)
    parts, cache = [out.logits[0]], getattr(out, "cache", None)
    for token in ids[first:]:
        out = model(torch.tensor([[token]]), cache=cache, use_cache=True)
        parts.append(out.logits[0])
    return torch.cat(parts)
