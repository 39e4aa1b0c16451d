"""Example checkpoints: published layout, released ranges, the same bytes for the same seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from k3tvm.checkpoint import Checkpoint, expected_tensors, mxfp4
from k3tvm.checkpoint.a_log import per_head
from k3tvm.checkpoint.example import write_example
from k3tvm.checkpoint.inspect import inspect_checkpoint
from k3tvm.checkpoint.presets import PRESETS, TINY_KDA, TINY_LINEAR, TINY_MLA_LAYERS, kimi_linear
from k3tvm.checkpoint.random_weights import RandomWeights
from k3tvm.errors import CheckpointError, ConfigError
from k3tvm.relax_models.config import ModelConfig
from tests.tolerances import tolerance

SMALL = [name for name in PRESETS if "tiny" in name]


@pytest.fixture(scope="module")
def k3_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("example") / "k3-tiny", "k3-tiny", seed=5)


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


@pytest.mark.parametrize("preset", SMALL)
def test_small_presets_are_whole_and_finite(preset: str, tmp_path: Path) -> None:
    """Our own check accepts them, and an independent reader finds only finite numbers."""
    folder = write_example(tmp_path / preset, preset, seed=2)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check()
    assert inspect_checkpoint(checkpoint).bytes < 10e6
    for shard in folder.glob("*.safetensors"):
        for name, values in load_file(shard).items():
            assert np.isfinite(values.astype(np.float32)).all(), name


def test_same_seed_same_bytes_other_seed_other_bytes(k3_tiny: Path, tmp_path: Path) -> None:
    again = write_example(tmp_path / "again", "k3-tiny", seed=5)
    other = write_example(tmp_path / "other", "k3-tiny", seed=6)
    assert digest(again) == digest(k3_tiny) != digest(other)


def test_layout_is_the_published_one(k3_tiny: Path) -> None:
    """Layer i in shard i+1, nested configuration, dtypes of specification 2."""
    checkpoint = Checkpoint.open(k3_tiny)
    stored = {name: (i.dtype, i.shape, i.shard.name) for name, i in checkpoint.tensors.items()}
    layer = "language_model.model.layers.4."
    shard = "model-00005-of-00008.safetensors"
    assert stored[f"{layer}self_attn.A_log"] == ("F32", (16,), shard)
    assert stored[f"{layer}self_attn.q_conv1d.weight"] == ("F32", (48, 1, 4), shard)
    assert stored[f"{layer}self_attn.o_norm.weight"] == ("F32", (16,), shard)
    assert stored[f"{layer}self_attn.q_proj.weight"] == ("BF16", (48, 112), shard)
    gate = f"{layer}block_sparse_moe.gate."
    assert stored[f"{gate}weight"] == ("BF16", (10, 112), shard)
    assert stored[f"{gate}e_score_correction_bias"] == ("F32", (10,), shard)
    expert = f"{layer}block_sparse_moe.experts.9.w2."
    assert stored[f"{expert}weight_packed"] == ("U8", (64, 48), shard)
    assert stored[f"{expert}weight_scale"] == ("U8", (64, 3), shard)
    assert set(json.loads((k3_tiny / "config.json").read_text())) >= {"text_config", "model_type"}


def test_kimi_linear_layout_is_the_published_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_example(tmp_path / "linear", "kimi-linear-tiny"))
    stored = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    assert stored["model.layers.0.self_attn.A_log"] == ("F32", (1, 1, 3, 1))
    assert stored["model.layers.1.block_sparse_moe.experts.9.w2.weight"] == ("BF16", (112, 96))
    assert "model.layers.0.self_attn.g_b_proj.weight" in stored
    assert "model.layers.2.self_attn.q_proj.weight" in stored


def test_all_widths_of_k3_tiny_are_distinct() -> None:
    """So that a swapped or transposed dimension cannot hide, F3 and F16."""
    c = ModelConfig.from_json(PRESETS["k3-tiny"].config)
    widths = [c.vocab_size, c.hidden_size, c.kda_width, c.kda_head_dim, c.kda_heads, c.num_heads]
    widths += [c.q_lora_rank or 0, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim]
    widths += [c.v_head_dim, c.qk_head_dim, c.num_heads * c.qk_head_dim, c.conv_kernel]
    widths += [c.num_heads * c.v_head_dim, c.intermediate_size, c.num_experts, c.shared_size]
    widths += [c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.moe_intermediate_size]
    widths += [c.expert_width, c.kv_lora_rank + c.qk_rope_head_dim, c.num_layers]
    assert len(set(widths)) == len(widths)
    assert c.num_layers % (c.attn_res_block_size or 1) != 0


def test_decays_fill_the_released_range_F10(k3_tiny: Path) -> None:
    """A_log in [-0.5, 1.0] with a zero tail, and bounded gates from near -5 to near 0."""
    checkpoint, gates = Checkpoint.open(k3_tiny), []
    for layer in (0, 1, 3, 4):
        start = f"language_model.model.layers.{layer}.self_attn."
        a_log = per_head(checkpoint.tensor(f"{start}A_log"), 3, "A_log")
        assert ((a_log >= -0.5) & (a_log <= 1.0)).all() and a_log.all()
        assert not checkpoint.tensor(f"{start}A_log")[3:].any()
        bias = checkpoint.tensor(f"{start}dt_bias").reshape(3, 16)
        gates.append(-5 / (1 + np.exp(-np.exp(a_log)[:, None] * bias)))
    assert np.min(gates) < -4.9 and np.max(gates) > -0.05 and -3.5 < np.median(gates) < -0.05


def test_selection_bias_changes_the_order_F15(k3_tiny: Path) -> None:
    """For most tokens, the chosen experts differ with and without the bias."""
    checkpoint = Checkpoint.open(k3_tiny)
    gate = "language_model.model.layers.1.block_sparse_moe.gate."
    weight = checkpoint.tensor(f"{gate}weight").astype(np.float32)
    hidden = np.random.default_rng(0).standard_normal((300, 112), np.float32)
    scores = 1 / (1 + np.exp(-hidden @ weight.T))
    biased = scores + checkpoint.tensor(f"{gate}e_score_correction_bias")
    plain, chosen = (np.sort(np.argsort(-s, axis=1)[:, :3]) for s in (scores, biased))
    assert (plain != chosen).any(axis=1).mean() > 0.3


@pytest.mark.parametrize("preset", ["k3-tiny", "k3-bench"])
def test_experts_have_the_spread_of_their_fan_in(preset: str) -> None:
    """Encoded and drawn experts alike: 1/sqrt(fan-in), so that outputs keep their size."""
    config = ModelConfig.from_json(PRESETS[preset].config)
    weights = RandomWeights(3, config.kda_heads, PRESETS[preset].drawn)
    specs = {s.name: s for s in expected_tensors(config)}
    start = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_"
    packed, scale = (weights.make(specs[start + part]) for part in ("packed", "scale"))
    values = mxfp4.decode(packed, scale)
    ratio = float(values.std()) * np.sqrt(config.expert_width)
    assert abs(ratio - 1) < tolerance("example_spread")
    assert len(np.unique(scale)) > 1 and set(np.unique(mxfp4.unpack(packed))) >= set(range(1, 8))


def test_bench_presets_have_the_agreed_sizes() -> None:
    """471 M parameters; and routed experts as at least 70 % of a token's bytes."""
    facts = {}
    for name in ("k3-bench", "k3-bench-moe", "k3-twin"):
        specs = expected_tensors(ModelConfig.from_json(PRESETS[name].config))
        config = ModelConfig.from_json(PRESETS[name].config)
        share = config.experts_per_token / config.num_experts
        experts = sum(spec.nbytes for spec in specs if spec.expert is not None) * share
        rest = sum(s.nbytes for s in specs if s.expert is None and s.role != "embedding")
        facts[name] = (sum(spec.parameters for spec in specs), experts, rest)
    assert round(facts["k3-bench"][0] / 1e6) == 471
    # With the router in F32, as peers keep it, this is the 216.5 MB that they read a token.
    assert round(sum(facts["k3-bench"][1:]) / 1e6, 1) == 215.5
    assert round(facts["k3-twin"][0] / 1e9, 3) == 0.389
    _, experts, rest = facts["k3-bench-moe"]
    assert experts / (experts + rest) >= 0.7 and experts > 4 * 32 * 2**20


def test_unknown_preset_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k3-tiny"):
        write_example(tmp_path / "x", "k3-huge")


def test_foreign_folder_is_never_touched(k3_tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        write_example(tmp_path, "k3-tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(CheckpointError, match="cannot be made a folder"):
        write_example(tmp_path / "config.json", "k3-tiny")


def test_earlier_example_is_replaced_whole(tmp_path: Path) -> None:
    """No shard of the longer one stays behind."""
    write_example(tmp_path / "x", "k3-tiny")
    stale = ("model-00009-of-00009.safetensors", "model-00001-of-00009.safetensors.part")
    for name in (*stale, "notes.txt"):
        (tmp_path / "x" / name).write_bytes(b"old")
    write_example(tmp_path / "x", "kimi-linear-tiny")
    left = {path.name for path in (tmp_path / "x").iterdir()}
    assert not left & set(stale) and "notes.txt" in left
    Checkpoint.open(tmp_path / "x").check()
    assert Checkpoint.open(tmp_path / "x").config.family == "kimi-linear"


def test_interrupted_writing_leaves_no_checkpoint_and_can_be_repeated_F21(
    k3_tiny: Path, tmp_path: Path
) -> None:
    def stop(written: int, total: int) -> None:
        if written > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_example(tmp_path / "x", "k3-tiny", 5, stop)
    with pytest.raises(ConfigError, match="no such file"):
        Checkpoint.open(tmp_path / "x")
    assert digest(write_example(tmp_path / "x", "k3-tiny", 5)) == digest(k3_tiny)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_example(tmp_path / "x", "k3-dense-tiny", progress=lambda *now: seen.append(now))
    assert [now for now, _ in seen] == sorted({now for now, _ in seen})
    assert seen[-1][0] == seen[-1][1]


def test_kimi_linear_preset_is_built_from_the_shared_table() -> None:
    """The table's helper gives the flat layout: no nested object, no K3 field."""
    values = kimi_linear(TINY_LINEAR, TINY_KDA, TINY_MLA_LAYERS)
    assert "text_config" not in values and "attn_res_block_size" not in values
    assert values["linear_attn_config"]["full_attn_layers"] == [3, 6, 7]
