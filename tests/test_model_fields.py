"""Every field of config.json, flipped: the compiled logits change, or it is refused (F9, F17)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tvm.checkpoint import Checkpoint, example
from k3tvm.checkpoint.example import write_example
from k3tvm.checkpoint.presets import PRESETS, TINY_K3, TINY_KDA, k3
from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.errors import CheckpointError, ConfigError
from k3tvm.runtime.engine import Engine
from tests.bundles import Bundles

Json = dict[str, Any]
Change = Callable[[Json], object]
IDS = [5, 17, 3, 250, 41, 8, 99, 13]

# On k3-tiny: another value does not fit the tensors, the other fields, or what is implemented.
REFUSED: Json = {
    "vocab_size": 500,
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "intermediate_size": 150,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "num_experts": 9,
    "moe_intermediate_size": 64,
    "num_shared_experts": 1,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 2,
    "moe_router_activation_func": "softmax",
    "use_grouped_topk": False,
    "topk_method": "greedy",
    "tie_word_embeddings": True,
    "linear_attn_config.num_heads": 4,
    "linear_attn_config.head_dim": 8,
    "linear_attn_config.short_conv_kernel_size": 3,
    "linear_attn_config.use_full_rank_gate": False,
    "linear_attn_config.full_attn_layers": [3, 5, 7],
    "linear_attn_config.kda_layers": [1, 2, 4, 6],
}
# On a smaller model, whose tensors fit either way.
COMPUTED: Json = {
    "rms_norm_eps": 1e-2,
    "attn_res_block_size": 2,
    "activation_situ_beta": 2.0,
    "activation_situ_linear_beta": None,
    "num_experts_per_token": 2,
    "moe_renormalize": False,
    "routed_scaling_factor": 2.0,
    "num_expert_group": 2,
    "topk_group": 3,
    "linear_attn_config.gate_lower_bound": -2.0,
}
# Limits and ids of the caller; how things are stored, which the tensors themselves say; labels.
ELSEWHERE = {
    *("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("dtype", "quantization_config", "num_nextn_predict_layers", "architectures", "model_type"),
}


def text_of(config: Json) -> Json:
    return config["text_config"]


def flipped(config: Json, field: str, value: Any) -> Json:
    copy = json.loads(json.dumps(config))
    *outer, name = field.split(".")
    fields = text_of(copy)
    for part in outer:
        fields = fields[part]
    if fields[name] == value:
        raise ValueError(f"{field} is {value} already")
    fields[name] = value
    return copy


def beside(config: Json, source: Path, folder: Path) -> Path:
    """A checkpoint folder with this configuration and the tensors of `source`, as links."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_field_is_listed_here() -> None:
    text = text_of(PRESETS["k3-tiny"].config)
    names = {n for n in text if n != "linear_attn_config"}
    names |= {f"linear_attn_config.{n}" for n in text["linear_attn_config"]}
    with_act = {*REFUSED, *COMPUTED, *ELSEWHERE, "hidden_act"}
    assert names == with_act and not REFUSED.keys() & COMPUTED.keys()


@pytest.mark.parametrize("field", REFUSED)
def test_f17_a_value_that_does_not_fit_is_refused(
    bundles: Bundles, tmp_path: Path, field: str
) -> None:
    source = bundles.checkpoint("k3-tiny")
    config = flipped(PRESETS["k3-tiny"].config, field, REFUSED[field])
    folder = beside(config, source, tmp_path / "flipped")
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        Checkpoint.open(folder).check()
    assert "\n" not in str(caught.value) and caught.value.where


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KDA layers, experts in five groups; no latent norm, which would cancel a scale."""
    sizes = TINY_K3 | {"num_hidden_layers": 3, "num_expert_group": 5, "topk_group": 2}
    config = k3(sizes, TINY_KDA, mla=())
    text_of(config)["latent_moe_use_norm"] = False
    folder = tmp_path_factory.mktemp("fields") / "small"
    with pytest.MonkeyPatch.context() as patch:
        preset = replace(PRESETS["k3-tiny"], config=config)
        patch.setattr(example, "PRESETS", {"small": preset})
        return write_example(folder, "small", 2)


def logits(checkpoint: Path, out: Path) -> np.ndarray:
    """Of a bundle for any x86-64: the code that is compiled fastest."""
    compile_checkpoint(checkpoint, out, Options(target="cpu:portable", context=16))
    return Engine.open(out).logits(IDS)


@pytest.fixture(scope="module")
def wanted(small: Path) -> np.ndarray:
    return logits(small, small.with_name("small.bundle"))


def check_changed(config: Json, small: Path, wanted: np.ndarray, tmp_path: Path) -> None:
    folder = beside(config, small, tmp_path / "flipped")
    got = logits(folder, tmp_path / "out")
    assert np.isfinite(got).all()
    change = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert change > 1e-3


@pytest.mark.parametrize("field", COMPUTED)
def test_f17_a_value_that_fits_changes_the_logits(
    small: Path, wanted: np.ndarray, tmp_path: Path, field: str
) -> None:
    config = json.loads((small / "config.json").read_text())
    check_changed(flipped(config, field, COMPUTED[field]), small, wanted, tmp_path)


def without_bound(text: Json) -> None:
    """F9: the gate of Kimi-Linear and of the twin."""
    del text["linear_attn_config"]["gate_lower_bound"]


def silu(text: Json) -> None:
    for name in ("activation_situ_beta", "activation_situ_linear_beta"):
        del text[name]
    text["hidden_act"] = "silu"


@pytest.mark.parametrize("change", [without_bound, silu])
def test_f9_f17_another_gate_or_activation_changes_the_logits(
    small: Path, wanted: np.ndarray, tmp_path: Path, change: Change
) -> None:
    config = json.loads((small / "config.json").read_text())
    change(text_of(config))
    check_changed(config, small, wanted, tmp_path)


def test_f17_the_position_limit_bounds_the_context(small: Path, tmp_path: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    text_of(config)["max_position_embeddings"] = 77
    folder = beside(config, small, tmp_path / "flipped")
    options = Options(target="cpu:portable", weights=False)
    assert compile_checkpoint(folder, tmp_path / "out", options).context == 77
