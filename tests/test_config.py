"""ModelConfig: every field is used or refused by name, and families are told by features."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tvm.checkpoint.presets import PRESETS
from k3tvm.errors import ConfigError
from k3tvm.relax_models.config import ModelConfig
from k3tvm.relax_models.config_tables import FIXED, INERT, INERT_OUTER, MOE_FIELDS

DATA = Path(__file__).parent / "data"
Json = dict[str, Any]


def real(name: str) -> Json:
    """A published configuration."""
    return json.loads((DATA / name / "config.json").read_text())


def text(values: Json) -> Json:
    """The object that holds the text model's fields."""
    return values.get("text_config", values)


def changed(values: Json, change: Callable[[Json], Any]) -> Json:
    """A copy with `change` applied to the text model's object."""
    values = copy.deepcopy(values)
    change(text(values))
    return values


def refusal(values: Json) -> str:
    """The one-line message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_k3_is_read_as_published() -> None:
    config = ModelConfig.from_json(real("kimi-k3"))
    assert config.family == "kimi-k3" and config.tensor_prefix == "language_model."
    assert config.layer_kinds.count("kda") == 69 and config.layer_kinds[-3:] == (
        "kda",
        "mla",
        "mla",
    )
    assert [i for i, kind in enumerate(config.layer_kinds) if kind == "mla"][:2] == [3, 7]
    assert (config.kda_heads, config.kda_head_dim, config.conv_kernel) == (96, 128, 4)
    assert config.gate_lower_bound == -5.0 and config.kda_full_rank_gate
    assert (config.num_experts, config.experts_per_token, config.expert_width) == (896, 16, 3584)
    assert (config.shared_size, config.latent_norm, config.mxfp4_experts) == (6144, True, True)
    assert [config.ffn_kind(i) for i in (0, 1, 92)] == ["dense", "moe", "moe"]
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        163584,
        163586,
        163839,
    )


def test_twin_runs_the_softplus_gate_F9() -> None:
    config = ModelConfig.from_json(real("kimi-k3-0.40b"))
    assert config.family == "kimi-k3" and config.gate_lower_bound is None
    assert config.kda_full_rank_gate and config.weight_dtype == "F32" and not config.mxfp4_experts


def test_kimi_linear_is_read_as_published() -> None:
    config = ModelConfig.from_json(real("kimi-linear-48b"))
    assert config.family == "kimi-linear" and config.tensor_prefix == ""
    assert config.q_lora_rank is None and config.latent_size is None
    assert config.expert_width == config.hidden_size == 2304
    assert config.attn_res_block_size is None and not config.mla_output_gate
    assert config.routed_scaling_factor == 2.446 and config.max_position_embeddings == 1048576


def test_family_does_not_depend_on_model_type_F24() -> None:
    """Both families name `kimi_linear`; a renamed or absent model_type changes nothing."""
    for name in ("kimi-k3", "kimi-linear-48b"):
        values = real(name)
        expected = ModelConfig.from_json(values)
        for word in ("kimi_k3", "kimi_linear", "other"):
            renamed = copy.deepcopy(values)
            text(renamed)["model_type"] = word
            assert ModelConfig.from_json(renamed) == expected
        assert ModelConfig.from_json(changed(values, lambda t: t.pop("model_type"))) == expected


def test_flat_k3_is_a_k3_F24() -> None:
    """K3's text object by itself is still told from Kimi-Linear by its features."""
    config = ModelConfig.from_json(text(real("kimi-k3")))
    assert config.family == "kimi-k3" and config.tensor_prefix == ""


def other(value: Any) -> Any:
    """A different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return value[:-1] or [1]
    return {"unknown": 1} if isinstance(value, dict) else 1


def outcome(values: Json) -> ModelConfig | str:
    try:
        return ModelConfig.from_json(values)
    except ConfigError as error:
        return str(error)


def silent_fields(values: Json, inside: str | None) -> list[str]:
    """Fields of the text object, or of an object inside it, whose change goes unnoticed."""
    before, silent = ModelConfig.from_json(values), []
    holder = text(values)[inside] if inside else text(values)
    for name, value in holder.items():
        new = "float32" if name == "dtype" else other(value)

        def put(t: Json, name: str = name, new: Any = new) -> None:
            (t[inside] if inside else t)[name] = new

        if outcome(changed(values, put)) == before and name not in INERT:
            silent.append(name)
    return silent


@pytest.mark.parametrize("inside", [None, "linear_attn_config"])
@pytest.mark.parametrize("preset", ["k3-tiny", "k3-tiny-groups", "kimi-linear-tiny"])
def test_every_field_matters_or_is_listed_as_inert_F17(preset: str, inside: str | None) -> None:
    """Changing a field changes the result, is refused, or the field stands in the one list."""
    assert silent_fields(PRESETS[preset].config, inside) == []


@pytest.mark.parametrize("name", sorted(INERT))
def test_inert_field_is_never_read(name: str) -> None:
    """A field that is listed as inert but read would hide from the test above."""
    values = PRESETS["k3-tiny"].config
    odd = changed(values, lambda t: t.update({name: ["anything", 7]}))
    assert ModelConfig.from_json(odd) == ModelConfig.from_json(values)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_other_value_of_a_fixed_field_is_refused_F17(name: str) -> None:
    """E.g. rope scaling, biases, tied embeddings: the message names the field."""
    values = changed(PRESETS["k3-tiny"].config, lambda t: t.update({name: {"a": 1}}))
    message = refusal(values)
    assert f"'{name}'" in message and "not implemented" in message


REFUSED: list[tuple[str, Any]] = [
    ("mla_use_nope", False),
    ("moe_router_activation_func", "softmax"),
    ("topk_method", "greedy"),
    ("use_grouped_topk", False),
    ("hidden_act", "gelu"),
    ("num_key_value_heads", 1),
    ("tie_word_embeddings", True),
    ("attention_bias", True),
    ("rope_scaling", {"type": "yarn", "factor": 4}),
    ("rope_parameters", {"rope_type": "yarn"}),
    ("quantization_config", {"quant_method": "gptq"}),
    ("activation_situ_beta", None),
    ("activation_situ_beta", 0),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", "1e-5"),
    ("rms_norm_eps", 10**400),
    ("hidden_size", True),
    ("hidden_size", 0),
    ("hidden_size", -7168),
    ("hidden_size", 112.0),
    ("hidden_size", 2**40),
    ("num_hidden_layers", 10**8),
    ("num_experts_per_token", 11),
    ("num_expert_group", 3),
    ("topk_group", 2),
    ("first_k_dense_replace", 7),
    ("mla_use_output_gate", 1),
    ("eos_token_id", [1, 2]),
    ("latent_moe_use_norm", "yes"),
    ("routed_scaling_factor", None),
    ("routed_expert_hidden_size", 48),
    ("an_unheard_of_field", 1),
    ("linear_attn_config", 3),
    ("model_max_length", 5),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda item: str(item)[:24])
def test_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    """Values of the wrong type, range or meaning, F17."""
    message = refusal(changed(PRESETS["k3-tiny"].config, lambda t: t.update({name: value})))
    named = {"routed_expert_hidden_size": "quantization_config", "rope_parameters": "rope_type"}
    named |= {"quantization_config": "quant_method"}
    assert f"'{named.get(name, name)}'" in message


LINEAR_REFUSED: list[tuple[str, Any]] = [
    ("gate_lower_bound", 5.0),
    ("gate_lower_bound", 0),
    ("head_dim", None),
    ("num_heads", 0),
    ("short_conv_kernel_size", 1),
    ("kda_layers", [0, 1, 3, 4]),
    ("kda_layers", [1, 2, 4, 4, 5]),
    ("kda_layers", [1, 2, 4, 5, 6]),
    ("kda_layers", [1, 2, 4]),
    ("full_attn_layers", [3, 6, 7, 8]),
    ("full_attn_layers", "3,6,7"),
    ("allow_neg_eigval", True),
]


@pytest.mark.parametrize(("name", "value"), LINEAR_REFUSED, ids=lambda item: str(item)[:24])
def test_wrong_linear_attention_field_is_refused_by_name(name: str, value: Any) -> None:
    """Layer lists count from 1 and must be a partition (specification 7.10)."""
    values = PRESETS["k3-tiny"].config
    message = refusal(changed(values, lambda t: t["linear_attn_config"].update({name: value})))
    assert f"'{name}'" in message


REQUIRED = """vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads
q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope
attn_res_block_size
num_experts num_experts_per_token moe_intermediate_size routed_expert_hidden_size
latent_moe_use_norm first_k_dense_replace moe_renormalize moe_router_activation_func
routed_scaling_factor hidden_act activation_situ_beta activation_situ_linear_beta rms_norm_eps
max_position_embeddings linear_attn_config"""


@pytest.mark.parametrize("name", REQUIRED.split())
def test_absent_field_is_refused_by_name_F18(name: str) -> None:
    """Nothing that changes the logits is guessed; the latent norm's field is one case of it."""
    message = refusal(changed(PRESETS["k3-tiny"].config, lambda t: t.pop(name)))
    assert f"required field '{name}' is absent" in message


@pytest.mark.parametrize("gone", ["zero", "null", "absent"])
def test_dense_model_needs_no_expert_fields_F23(gone: str) -> None:
    def strip(values: Json) -> None:
        for name in MOE_FIELDS:
            values.pop(name, None)
        values.update(num_experts={"zero": 0, "null": None}.get(gone))
        if gone == "absent":
            values.pop("num_experts")

    config = ModelConfig.from_json(changed(PRESETS["k3-dense-tiny"].config, strip))
    assert config == ModelConfig.from_json(PRESETS["k3-dense-tiny"].config)
    assert {config.ffn_kind(layer) for layer in range(7)} == {"dense"}
    assert config.shared_size == 0 and config.latent_size is None


@pytest.mark.parametrize("count", [1, 7, 242])
def test_any_expert_count_is_accepted_F23(count: int) -> None:
    sizes = {"num_experts": count, "num_experts_per_token": 1}
    config = ModelConfig.from_json(changed(PRESETS["k3-tiny"].config, lambda t: t.update(sizes)))
    assert config.num_experts == count


def test_expert_width_is_the_latent_width_F16() -> None:
    config = ModelConfig.from_json(PRESETS["k3-tiny"].config)
    assert config.expert_width == 64 != config.hidden_size


def test_moe_layer_frequency_counts_from_layer_zero() -> None:
    values = changed(PRESETS["k3-tiny"].config, lambda t: t.update(moe_layer_freq=2))
    config = ModelConfig.from_json(values)
    kinds = [config.ffn_kind(layer) == "moe" for layer in range(7)]
    assert kinds == [False, False, True, False, True, False, True]


def test_linear_beta_null_leaves_the_up_side_alone() -> None:
    values = changed(
        PRESETS["k3-tiny"].config, lambda t: t.update(activation_situ_linear_beta=None)
    )
    assert ModelConfig.from_json(values).situ_linear_beta is None


def test_situ_field_with_silu_is_refused() -> None:
    values = changed(PRESETS["k3-silu-tiny"].config, lambda t: t.update(activation_situ_beta=4.0))
    assert "'activation_situ_beta'" in refusal(values)


def test_outer_and_inner_objects_are_both_checked() -> None:
    values = PRESETS["k3-tiny"].config | {"rope_scaling": {"factor": 2}}
    assert "'rope_scaling'" in refusal(values)
    assert "'surprise'" in refusal(PRESETS["k3-tiny"].config | {"surprise": 1})
    assert "vision_config" in INERT_OUTER and "vision_config" not in INERT


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"hidden_size": 1',
    "list": b"[]",
    "nan": b'{"rms_norm_eps": NaN}',
    "doubled": b'{"hidden_size": 1, "hidden_size": 2}',
    "binary": b"\xff\xfe\x00",
    "deep": b'{"a":' * 100000,
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_unreadable_file_is_one_line_with_its_path(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_file(tmp_path / "config.json")
