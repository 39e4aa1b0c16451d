"""Our reference and bundles against programs that nobody here wrote (`pytest -m oracle`).

What the peers do differently, and who is right, stands in docs/peers.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from k3tvm.checkpoint.example import write_example
from k3tvm.reference import Reference
from k3tvm.relax_models.config import ModelConfig
from tests.bundles import Bundles
from tests.oracle.written import write
from tests.reference_checks import nmse, random_ids
from tests.reference_models import CONFIGS, K3, LINEAR, random_tensors
from tests.tolerances import tolerance

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("one_thread")]

PROMPT, LENGTH = 70, 90  # a prompt longer than a chunk of 64, then single steps

TRANSFORMERS = {
    "linear": LINEAR,
    "linear-q-lora-groups": CONFIGS["linear-q-lora-groups"],
    "linear-one-head": replace(LINEAR, kda_heads=1, num_experts=7),
    "linear-no-renormalize": replace(LINEAR, renormalize=False),
}
MLX = {name: config for name, config in CONFIGS.items() if name.startswith("k3")} | {
    "k3-low-rank-gate": replace(
        K3, kda_full_rank_gate=False, mla_output_gate=False, q_lora_rank=None
    ),
    "k3-plain-residual": replace(K3, attn_res_block_size=None),
    "k3-no-latent-norm": replace(
        K3, latent_norm=False, renormalize=False, routed_scaling_factor=1.7
    ),
    "k3-up-side-alone": replace(K3, situ_linear_beta=None),
    "k3-top-1": replace(
        K3, experts_per_token=1, latent_size=None, latent_norm=False, mxfp4_experts=False
    ),
}


def compare(ours: Reference, theirs, folder: Path, first: int = PROMPT) -> float:
    """NMSE of the peer's logits on the same folder and ids."""
    ids = random_ids(ours.config, LENGTH)
    want, _ = ours.forward(ids)
    return nmse(theirs.logits(theirs.load(folder), ids, first), want)


def stored_reference(folder: Path, config: ModelConfig) -> Reference:
    """The folder, written, and the reference on exactly the tensors that were stored."""
    return Reference(config, write(folder, config, random_tensors(config, 1)))


# A peer that is not installed is an error, not a skip: who asks for these tests wants them run.


@pytest.fixture
def transformers_peer():
    from tests.oracle import peer_transformers

    return peer_transformers


@pytest.fixture
def mlx_peer():
    from tests.oracle import peer_mlx

    return peer_mlx


@pytest.mark.parametrize("first", [LENGTH, PROMPT])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_agrees_in_float64(tmp_path, transformers_peer, name, first):
    ours = stored_reference(tmp_path, TRANSFORMERS[name])
    assert compare(ours, transformers_peer, tmp_path, first) <= tolerance("oracle_float64")


@pytest.mark.parametrize("name", MLX)
def test_mlx_lm_agrees_in_float32(tmp_path, mlx_peer, name):
    ours = stored_reference(tmp_path, MLX[name])
    assert compare(ours, mlx_peer, tmp_path) <= tolerance("oracle_float32")


def test_transformers_agrees_on_the_kimi_linear_example(tmp_path, transformers_peer):
    write_example(tmp_path, "kimi-linear-tiny", 0)
    ours = Reference.from_checkpoint(tmp_path)
    assert compare(ours, transformers_peer, tmp_path) <= tolerance("oracle_float64")


@pytest.mark.parametrize("preset", ["k3-tiny", "k3-dense-tiny", "k3-pruned-tiny"])
def test_mlx_lm_agrees_on_the_k3_examples(tmp_path, mlx_peer, preset):
    write_example(tmp_path, preset, 0)
    ours = Reference.from_checkpoint(tmp_path)
    assert compare(ours, mlx_peer, tmp_path) <= tolerance("oracle_float32")


def test_mlx_lm_lets_masked_groups_in_when_picks_are_negative(tmp_path, mlx_peer):
    """Known difference: it masks with 0, the official file and we with -inf (docs/peers.md)."""
    config, tensors = CONFIGS["k3-groups"], random_tensors(CONFIGS["k3-groups"], 1)
    shifted = {n: t - 2 for n, t in tensors.items() if n.endswith("e_score_correction_bias")}
    kept = write(tmp_path, config, tensors | shifted)
    assert compare(Reference(config, kept), mlx_peer, tmp_path) > 0.1


def test_transformers_normalises_a_single_expert(tmp_path, transformers_peer):
    """Known difference: the official file normalises sums of several only (docs/peers.md)."""
    config = replace(LINEAR, experts_per_token=1)
    ours = stored_reference(tmp_path, config)
    assert compare(ours, transformers_peer, tmp_path) > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_written_by_the_tests_opens_as_a_checkpoint(tmp_path, name):
    ours, ids = stored_reference(tmp_path, CONFIGS[name]), random_ids(CONFIGS[name], 10)
    assert torch.equal(Reference.from_checkpoint(tmp_path).forward(ids)[0], ours.forward(ids)[0])


@pytest.mark.parametrize("preset", ["k3-tiny", "k3-dense-tiny", "k3-pruned-tiny"])
def test_a_compiled_bundle_agrees_with_mlx_lm(bundles, mlx_peer, preset):
    """The bundle itself, without our reference in between: prompt by prefill, the rest decoded."""
    assert compiled_error(bundles, mlx_peer, preset) <= tolerance("oracle_float32")


def test_a_compiled_bundle_agrees_with_transformers(bundles, transformers_peer):
    assert compiled_error(bundles, transformers_peer, "kimi-linear-tiny") <= tolerance(
        "oracle_float32"
    )


def compiled_error(bundles: Bundles, theirs, preset: str) -> float:
    """NMSE of a bundle's logits against the peer's."""
    engine = bundles.engine(preset)
    ids = random_ids(engine.config, LENGTH)
    rows = [engine.logits(ids[:PROMPT]), *(engine.decode([i]) for i in ids[PROMPT:])]
    want = theirs.logits(theirs.load(bundles.checkpoint(preset)), ids, PROMPT)
    return nmse(torch.from_numpy(np.concatenate(rows)), want)
