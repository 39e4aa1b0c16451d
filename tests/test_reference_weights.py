"""Tensors as stored to tensors as computed with: MXFP4, A_log, names, shapes, whole folders."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from k3tvm.checkpoint import Checkpoint, expected_tensors
from k3tvm.checkpoint.example import write_example
from k3tvm.errors import CheckpointError, ConfigError
from k3tvm.reference import Reference
from k3tvm.reference.weights import (
    as_torch,
    decode_mxfp4,
)
from tests.reference_checks import (
    f64,
    random_ids,
    reference,
)
from tests.reference_models import CONFIGS, K3, random_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def test_f14_every_scale_byte_and_code_has_its_exact_value():
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = [*magnitudes, *(-m for m in magnitudes)]
    packed = torch.tensor([c | c + 1 << 4 for c in range(0, 16, 2)] * 2, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    got = decode_mxfp4(packed.expand(255, -1), scales, torch.float64)
    for scale in range(255):
        assert got[scale].tolist() == [v * 2.0 ** (scale - 127) for v in values] * 2
    assert math.copysign(1, got[127, 8].item()) == -1
    with pytest.raises(CheckpointError, match="255"):
        decode_mxfp4(packed[None], torch.tensor([[255]], dtype=torch.uint8), torch.float64)


def test_f13_the_low_nibble_is_the_even_element():
    packed = torch.tensor([[0x21] + [0] * 15], dtype=torch.uint8)
    got = decode_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8), torch.float32)
    assert got[0].tolist() == [0.5, 1.0] + [0.0] * 30


def test_f14_scales_as_e8m0_are_the_same_bytes():
    byte = torch.tensor([[120, 0, 254]], dtype=torch.uint8)
    assert torch.equal(as_torch(byte.view(torch.float8_e8m0fnu)), byte)


def test_f8_a_log_is_per_head_in_all_three_stored_forms():
    config, ids = replace(K3, gate_lower_bound=None), random_ids(K3, 20)
    tensors = random_tensors(config)
    want, _ = Reference(config, tensors).forward(ids)
    name = "language_model.model.layers.1.self_attn.A_log"
    plain = tensors[name]
    for form in (torch.cat((plain, torch.zeros(13).double())), plain.reshape(1, 1, -1, 1)):
        got, _ = Reference(config, tensors | {name: form}).forward(ids)
        assert torch.equal(got, want)
    for wrong in (torch.cat((plain, f64([0.0, 1e-9]))), plain[:-1]):
        with pytest.raises(CheckpointError, match="A_log"):
            Reference(config, tensors | {name: wrong}).forward(ids)


def test_f19_a_missing_or_misshapen_tensor_is_named():
    tensors = random_tensors(K3)
    name = "language_model.model.layers.3.self_attn.q_b_proj.weight"
    with pytest.raises(CheckpointError, match="shape.*q_b_proj|q_b_proj.*shape"):
        Reference(K3, tensors | {name: tensors[name].T}).forward([1])
    tensors.pop(name)
    with pytest.raises(CheckpointError, match="q_b_proj.weight.*missing"):
        Reference(K3, tensors).forward([1])


@pytest.mark.parametrize("name", CONFIGS)
def test_f19_two_tables_of_names_and_shapes_agree(name):
    """The checkpoint reader's table and the one of these tests were written apart."""
    ours = {n: tuple(t.shape) for n, t in random_tensors(CONFIGS[name]).items()}
    theirs = {spec.name: tuple(spec.shape) for spec in expected_tensors(CONFIGS[name])}
    assert ours.keys() == theirs.keys()
    assert all(ours[n] == theirs[n] for n in ours if not n.endswith("A_log"))


@pytest.mark.parametrize("ids", [[], [-1], [3, K3.vocab_size]])
def test_f11_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ConfigError, match="token ids"):
        reference(K3).forward(ids)


@pytest.mark.parametrize("preset", ["k3-tiny", "kimi-linear-tiny"])
def test_f30_a_checkpoint_folder_gives_the_logits_of_its_tensors(tmp_path, preset, monkeypatch):
    write_example(tmp_path / "model", preset, 3)
    monkeypatch.chdir(tmp_path)
    model = Reference.from_checkpoint("model", torch.float32)
    ids = random_ids(model.config, 12)
    checkpoint = Checkpoint.open(tmp_path / "model")
    tensors = {name: as_torch(checkpoint.tensor(name)) for name in checkpoint.tensors}
    want, _ = Reference(checkpoint.config, tensors, torch.float32).forward(ids)
    assert torch.equal(model.forward(ids)[0], want) and want.std() > 0.01


def test_f19_a_folder_that_does_not_fit_its_config_is_refused(tmp_path):
    write_example(tmp_path, "k3-dense-tiny", 3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="embed_tokens"):
        Reference.from_checkpoint(tmp_path)
