"""All kernels of a model under the checks of test_checked: nothing is too far, nothing races."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.emulate.build import CHECK
from k3tvm.runtime.engine import Engine
from tests.bundles import Bundles

TARGETS = ("cuda-emulated", "metal-emulated")


@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_of_a_model_races(
    target: str, bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of more than one tile, the same slot again, then steps of one and of three."""
    monkeypatch.setenv(CHECK, "1")
    bundle = tmp_path / "checked.bundle"
    checkpoint = bundles.checkpoint("k3-tiny")
    compile_checkpoint(checkpoint, bundle, Options(target, "float32", slots=3, context=256))
    engine = Engine.open(bundle)
    ids = np.arange(24) * 7 % engine.config.vocab_size
    for at, end in ((0, 20), (20, 21), (21, 24)):
        logits, _ = engine.logits_and_routing(ids[at:end], 1)
        assert np.isfinite(logits).all()
    for slots in ([1], [2, 0, 1]):
        assert np.isfinite(engine.decode(ids[: len(slots)], slots)).all()
