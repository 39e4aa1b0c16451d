"""Checkpoint folders: every damage is one CheckpointError with cause and cure (F8, F19, F20)."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3tvm.checkpoint import Checkpoint, expected_tensors, mxfp4
from k3tvm.checkpoint.a_log import per_head
from k3tvm.checkpoint.example import write_example
from k3tvm.checkpoint.reader import read_header
from k3tvm.errors import CheckpointError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00008.safetensors", "model-00002-of-00008.safetensors"
LAYER = "language_model.model.layers."
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small K3 checkpoint that tests copy and never change."""
    return write_example(tmp_path_factory.mktemp("checkpoint") / "k3", "k3-tiny", seed=1)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "k3"))


def rewrite(folder: Path, shard: str, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of one shard and let the index follow."""
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard)
    index = json.loads((folder / INDEX).read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != shard}
    index["weight_map"] = kept | dict.fromkeys(tensors, shard)
    (folder / INDEX).write_text(json.dumps(index))


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refusal(folder: Path) -> str:
    """The message with which `open` and `check` refuse; one line, with a cure after ';'."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder).check()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700 and caught.value.cure
    assert str(folder) in message
    return message


# What is read


def test_whole_checkpoint_fits(written: Path) -> None:
    checkpoint = Checkpoint.open(written)
    checkpoint.check()
    assert checkpoint.has_data and not checkpoint.skipped
    assert {spec.name for spec in checkpoint.specs} == set(checkpoint.tensors)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == checkpoint.total_size


def test_tensors_equal_those_of_an_independent_reader(written: Path) -> None:
    checkpoint = Checkpoint.open(written)
    for shard in sorted(written.glob("*.safetensors")):
        for name, expected in load_file(shard).items():
            got = checkpoint.tensor(name)
            assert got.dtype == expected.dtype and got.shape == expected.shape
            assert got.tobytes() == expected.tobytes() and not got.flags.writeable


def test_tensors_are_mapped_and_bfloat16_stays_bfloat16(written: Path) -> None:
    checkpoint = Checkpoint.open(written)
    head = checkpoint.tensor("language_model.lm_head.weight")
    assert head.dtype == ml_dtypes.bfloat16 and not head.flags.owndata
    assert checkpoint.tensor(f"{LAYER}0.self_attn.A_log").dtype == np.float32


@pytest.mark.parametrize("shards", ["single", "several"])
def test_folder_without_index(shards: str, folder: Path) -> None:
    name = f"{LAYER}3.self_attn.q_proj.weight"
    expected = np.array(Checkpoint.open(folder).tensor(name))
    (folder / INDEX).unlink()
    if shards == "single":
        tensors: Tensors = {}
        for shard in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(shard)
            shard.unlink()
        save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    checkpoint.check()
    assert np.array_equal(checkpoint.tensor(name), expected)


def test_snapshot_of_links_into_a_blob_store_works_F20(folder: Path) -> None:
    """The hub cache keeps files as blobs named by hash, and snapshots of links to them."""
    snapshot, blobs = folder.parent / "snapshots" / "abc", folder.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob{number}")
    checkpoint = Checkpoint.open(snapshot)
    checkpoint.check()
    assert checkpoint.tensor("language_model.lm_head.weight").any()


def test_works_from_another_directory_F30(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    Checkpoint.open("k3").check()
    monkeypatch.chdir("/")
    Checkpoint.open(folder).check()


@pytest.mark.parametrize("packed", [False, True])
def test_index_without_shards_is_enough_to_plan(packed: bool, folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    if packed:
        (folder / f"{INDEX}.gz").write_bytes(gzip.compress((folder / INDEX).read_bytes()))
        (folder / INDEX).unlink()
    checkpoint = Checkpoint.open(folder)
    checkpoint.check()
    assert checkpoint.source == "index" and not checkpoint.has_data
    assert sum(map(checkpoint.nbytes, checkpoint.specs)) == checkpoint.total_size
    with pytest.raises(CheckpointError, match="download the shards"):
        checkpoint.tensor("language_model.lm_head.weight")


def test_config_alone_is_enough_to_plan(written: Path) -> None:
    checkpoint = Checkpoint.open(written / "config.json")
    checkpoint.check()
    assert checkpoint.source == "config" and checkpoint.specs == Checkpoint.open(written).specs


def test_scales_may_be_u8_or_e8m0_F14(folder: Path) -> None:
    """Both dtypes are the same bytes."""
    before = load_file(folder / SECOND)
    raw = (folder / SECOND).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + size])
    name = next(name for name in entries if name.endswith("w1.weight_scale"))
    entries[name]["dtype"] = "F8_E8M0"
    text = json.dumps(entries).encode()
    (folder / SECOND).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    after = Checkpoint.open(folder)
    after.check()
    assert after.tensors[name].dtype == "F8_E8M0"
    assert np.array_equal(after.tensor(name), before[name])


def test_unaligned_tensor_is_read_right(folder: Path) -> None:
    """A header of odd length puts float32 data at an odd offset."""
    raw = (folder / FIRST).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + size].rstrip()
    text += b" " * (1 if len(text) % 2 == 0 else 2)
    (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    expected = load_file(folder / FIRST)[f"{LAYER}0.self_attn.dt_bias"]
    got = Checkpoint.open(folder).tensor(f"{LAYER}0.self_attn.dt_bias")
    assert np.array_equal(got, expected) and got.flags.aligned


def test_plain_experts_are_recognised_by_presence(folder: Path) -> None:
    """A quantised configuration with plain experts: the tensors decide, not the declaration."""

    def expand(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            stem = name.removesuffix("_packed")
            values = mxfp4.decode(tensors.pop(name), tensors.pop(f"{stem}_scale"))
            tensors[stem] = values.astype(ml_dtypes.bfloat16)

    for shard in sorted(folder.glob("*.safetensors")):
        rewrite(folder, shard.name, expand)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check()
    assert not checkpoint.config.mxfp4_experts


@pytest.mark.parametrize("preset", ["k3-dense-tiny", "k3-pruned-tiny", "kimi-linear-tiny"])
def test_other_members_of_the_family_F23(preset: str, tmp_path: Path) -> None:
    Checkpoint.open(write_example(tmp_path / preset, preset)).check()


def test_vision_and_announced_prediction_layers_are_skipped(folder: Path) -> None:
    extra = [
        "vision_tower.patch_embed.proj.weight",
        "mm_projector.proj.0.weight",
        f"{LAYER}7.self_attn.q_proj.weight",
    ]
    rewrite(folder, FIRST, lambda t: t.update({name: np.ones(3, np.float32) for name in extra}))
    assert "more layers than 'num_hidden_layers'" in refusal(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(folder)
    checkpoint.check()
    assert checkpoint.skipped == tuple(sorted(extra))


# A_log, F8


def test_padded_a_log_gives_one_value_per_head_F8() -> None:
    heads = np.linspace(-0.5, 1, 96, dtype=np.float32)
    padded = np.concatenate((heads, np.zeros(32, np.float32)))
    for stored in (heads, padded, heads.reshape(1, 1, 96, 1)):
        assert np.array_equal(per_head(stored, 96, "A_log"), heads)


@pytest.mark.parametrize("shape", [(95,), (96, 1), (1, 1, 95, 1), (2, 96)])
def test_other_a_log_shapes_are_refused_F8(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="96 heads"):
        per_head(np.zeros(shape, np.float32), 96, "A_log")


@pytest.mark.parametrize("value", [1e-30, -1.0, np.nan])
def test_a_log_tail_that_is_not_zero_is_refused_F8(value: float, folder: Path) -> None:
    name = f"{LAYER}0.self_attn.A_log"

    def spoil(tensors: Tensors) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][-1] = value

    rewrite(folder, FIRST, spoil)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check()
    with pytest.raises(CheckpointError, match="A_log: values beyond the 3 heads are not zero"):
        checkpoint.tensor(name)


def test_scale_255_is_refused_when_it_is_loaded_F14(folder: Path) -> None:
    name = f"{LAYER}1.block_sparse_moe.experts.0.w1.weight_scale"
    rewrite(folder, SECOND, lambda t: t.update({name: np.full_like(t[name], 255)}))
    with pytest.raises(CheckpointError, match="255"):
        Checkpoint.open(folder).tensor(name)


# The five of F19, and their likely causes


def move(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def drop(tensors: Tensors, part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


Q = f"{LAYER}1.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Tensors], Any], list[str]]] = {
    "missing": (lambda t: drop(t, "1.input_layernorm"), ["1 tensors missing", "input_layernorm"]),
    "missing experts": (
        lambda t: drop(t, ".experts.9."),
        ["6 tensors missing", "and 3 more", "num_experts"],
    ),
    "extra": (
        lambda t: t.update({f"{LAYER}1.rotary.inv_freq": np.ones(3, np.float32)}),
        ["1 tensors not expected", "inv_freq", "config.json"],
    ),
    "extra expert": (
        lambda t: move(t, ".experts.9.", ".experts.10."),
        ["6 tensors missing", "6 tensors not expected", "num_experts"],
    ),
    "renamed": (
        lambda t: move(t, "input_layernorm", "in_norm"),
        ["1 tensors missing", "1 tensors not expected", "renamed"],
    ),
    "misshapen": (
        lambda t: t.update({Q: t[Q].T.copy()}),
        ["wrong form", "[112, 48], not [48, 112]"],
    ),
    "wrongly typed": (
        lambda t: t.update({Q: t[Q].astype(np.float16)}),
        ["is F16, not BF16 or F32"],
    ),
    "packed attention": (
        lambda t: move(t, "1.self_attn.q_proj.weight", "1.self_attn.q_proj.weight_packed"),
        ["only routed experts may be MXFP4"],
    ),
    "one plain expert": (
        lambda t: t.update({f"{LAYER}1.block_sparse_moe.experts.0.w1.weight": t[Q]}),
        ["MXFP4 or plain"],
    ),
    "low-rank gate": (
        lambda t: move(t, "1.self_attn.g_proj", "1.self_attn.g_a_proj"),
        ["use_full_rank_gate"],
    ),
    "no residual mix": (lambda t: drop(t, "_res_norm"), ["attn_res_block_size"]),
}


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_tensors_that_do_not_fit_are_named_with_their_cause_F19(kind: str, folder: Path) -> None:
    change, expected = DAMAGE[kind]
    rewrite(folder, SECOND, change)
    message = refusal(folder)
    assert [part for part in expected if part not in message] == [], message


def test_missing_prefix_is_recognised_F19(folder: Path) -> None:
    for shard in sorted(folder.glob("*.safetensors")):
        rewrite(folder, shard.name, lambda t: move(t, "language_model.", ""))
    message = refusal(folder)
    assert (
        "538 tensors missing" in message and "only the prefix 'language_model.' differs" in message
    )


def test_doubled_tensor_is_refused_F19(folder: Path) -> None:
    """In two shards, with an index and without."""
    name = "language_model.lm_head.weight"
    head = Checkpoint.open(folder).tensor(name)
    shard = load_file(folder / FIRST) | {name: np.asarray(head)}
    save_file(shard, folder / FIRST)
    assert name in refusal(folder)
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"'{name}' is also in {FIRST}"):
        Checkpoint.open(folder)


def test_tensor_that_the_index_does_not_name_is_refused_F19(folder: Path) -> None:
    change_index(folder, lambda weights: weights.pop(Q))
    assert "holds 1 tensors that the index does not name" in refusal(folder)


def test_tensor_that_its_shard_lacks_is_refused_F19(folder: Path) -> None:
    change_index(folder, lambda weights: weights.update({"ghost": SECOND}))
    assert "not in the shards that it names: ghost" in refusal(folder)


# Paths and files, F20


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a/b.safetensors",
        "..",
        "",
        "x.bin",
        "a\\b.safetensors",
        7,
    ],
)
def test_index_that_leads_out_of_the_folder_is_refused_F20(name: Any, folder: Path) -> None:
    (folder.parent / "x.safetensors").write_bytes((folder / FIRST).read_bytes())
    change_index(folder, lambda weights: weights.update({Q: name}))
    assert "plain *.safetensors file name" in refusal(folder)


def test_missing_shard_is_named_F20(folder: Path) -> None:
    (folder / SECOND).unlink()
    assert f"1 of 8 shards are missing: {SECOND}" in refusal(folder)


def test_link_that_leads_nowhere_is_a_missing_shard_F20(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("../blobs/gone")
    assert "1 of 8 shards are missing" in refusal(folder)


def header(entries: dict[str, Any] | bytes, data: int = 0, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "seven bytes": (b"1234567", "cut short"),
    "header cut": (header({"a": entry()}, 8)[:20], "cut short"),
    "data cut": (header({"a": entry()}, 7), "cut short"),
    "too long": (header({"a": entry()}, 9), "1 bytes longer"),
    "absurd length": (header(b"{}", 100, 2**62), "cut short"),
    "not JSON": (header(b"{nope}", 0), "not valid JSON"),
    "not an object": (header(b"[]", 0), "JSON object"),
    "doubled key": (header(b'{"a":1,"a":2}', 0), "'a' stands there twice"),
    "overlap": (
        header({"a": entry(), "b": entry(span=(4, 12))}, 12),
        "'b' overlaps",
    ),
    "hole": (header({"a": entry(), "b": entry(span=(12, 20))}, 20), "hole"),
    "outside": (header({"a": entry(shape=(200,), span=(0, 800))}, 8), "cut short"),
    "backwards": (header({"a": entry(span=(8, 0))}, 8), "spans -8 bytes"),
    "negative": (header({"a": entry(span=(-8, 0))}, 8), "malformed"),
    "shape and span": (header({"a": entry(shape=(3,))}, 8), "spans 8 bytes"),
    "unknown dtype": (header({"a": entry("F4")}, 8), "unknown dtype 'F4'"),
    "no dtype": (header({"a": entry(None)}, 8), "unknown dtype"),
    "odd shape": (header({"a": entry(shape=[True])}, 8), "malformed"),
    "odd span": (header({"a": entry(span=[0])}, 8), "malformed"),
    "odd entry": (header({"a": 3}, 8), "unknown dtype"),
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_damaged_shard_is_refused_F20(kind: str, tmp_path: Path) -> None:
    data, expected = BROKEN[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert expected in str(caught.value) and str(path) in str(caught.value)


def test_absurd_header_length_reads_nothing_F20(tmp_path: Path) -> None:
    """A sparse file large enough for the claimed header: refused by the limit, not read."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**33))
        os.ftruncate(file.fileno(), 2**34)
    with pytest.raises(CheckpointError, match="not plausible"):
        read_header(path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickled_weights_are_never_opened(suffix: str, folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / f"pytorch_model{suffix}").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert "pickled weights only" in refusal(folder)


def test_index_that_is_damaged_is_refused_F20(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')
    assert "has no 'weight_map'" in refusal(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "stands there twice" in refusal(folder)
    (folder / INDEX).unlink()
    (folder / f"{INDEX}.gz").write_bytes(gzip.compress(b"{}")[:-4])
    assert "damaged gzip" in refusal(folder)


def test_shard_that_shrinks_after_opening_is_noticed(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    with (folder / FIRST).open("r+b") as file:
        file.truncate(100_000)
    last = max(
        (info for info in checkpoint.tensors.values() if info.shard.name == FIRST),
        key=lambda info: info.offset,
    )
    with pytest.raises(CheckpointError, match="changed its length"):
        checkpoint.tensor(last.name)
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match="can no longer be read"):
        checkpoint.tensor(Q)


# The name map


def test_no_name_is_expected_twice() -> None:
    from k3tvm.checkpoint.presets import PRESETS
    from k3tvm.relax_models.config import ModelConfig

    for name, preset in PRESETS.items():
        names = [spec.name for spec in expected_tensors(ModelConfig.from_json(preset.config, name))]
        assert len(names) == len(set(names))


def test_same_name_differs_by_layer_kind(written: Path) -> None:
    """g_proj is the KDA gate in one layer and the MLA gate in another (specification 7.9)."""
    specs = Checkpoint.open(written).by_name
    kda, mla = (specs[f"{LAYER}{layer}.self_attn.g_proj.weight"] for layer in (0, 2))
    assert (kda.role, kda.shape) == ("kda.gate", (48, 112))
    assert (mla.role, mla.shape) == ("mla.gate", (100, 112))


def test_experts_have_the_latent_width_F16(written: Path) -> None:
    specs = Checkpoint.open(written).by_name
    expert = f"{LAYER}1.block_sparse_moe.experts.0."
    assert specs[f"{expert}w1.weight_packed"].shape == (96, 32)
    assert specs[f"{expert}w2.weight_packed"].shape == (64, 48)
    assert specs[f"{expert}w2.weight_scale"].shape == (64, 3)
