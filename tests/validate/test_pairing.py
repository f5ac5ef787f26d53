"""The verdict on a pair: what passes, what each kind of mismatch is called, and what the runtime then accepts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError, Usage
from draftpair.schemas import check, load_schema
from draftpair.validate import ValidatedPair, validate_pair, validated_pair
from fixtures import glm4_moe
from fixtures.folders import Folders
from fixtures.glm4_moe_lite import write_checkpoint, write_target
from fixtures.split_heads import edit_config
from fixtures.weights import write_safetensors

Change = Callable[[Any], None]


def verdict_of(
    folders: Folders, target: str = "target", drafter: str = "drafter"
) -> tuple[str, dict[str, str]]:
    """The verdict, and level by rule id; the report is held against its schema."""
    report = api.validate(getattr(folders, target), getattr(folders, drafter))
    assert check(report, load_schema("validate")) == []
    return report["verdict"], {finding["rule"]: finding["level"] for finding in report["findings"]}


@pytest.mark.parametrize("drafter", ["drafter", "drafter_4bit"])
def test_a_conversion_of_the_source_is_compatible(folders: Folders, drafter: str) -> None:
    verdict, rules = verdict_of(folders, drafter=drafter)
    assert verdict == "compatible"
    assert rules == {"PAIR-DERIVED": "note"}


@pytest.mark.parametrize("drafter", ["drafter", "drafter_4bit"])
def test_the_very_source_is_proven(folders: Folders, drafter: str) -> None:
    verdict, rules = verdict_of(folders, target="raw", drafter=drafter)
    assert (verdict, rules) == ("proven", {})


def test_without_a_manifest_nothing_is_proven(folders: Folders) -> None:
    (folders.drafter / "draftpair-manifest.json").unlink()
    verdict, rules = verdict_of(folders, target="raw")
    assert (verdict, rules) == ("compatible", {"PAIR-NO-PROVENANCE": "note", "PAIR-COPY": "note"})


def test_other_weights_of_the_same_shape_are_doubtful(folders: Folders) -> None:
    shutil.rmtree(folders.target)
    write_target(folders.target, seed=1)
    verdict, rules = verdict_of(folders)
    assert (verdict, rules) == ("doubtful", {"PAIR-PROVENANCE": "warning"})


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"hidden": 128}, "PAIR-HIDDEN-SIZE"),
        ({"vocab": 96}, "PAIR-VOCAB-SIZE"),
        ({"heads": 4}, "PAIR-GEOMETRY"),
        ({"experts": 4}, "PAIR-GEOMETRY"),
        ({"kv_lora": 32}, "PAIR-GEOMETRY"),
        ({"q_lora": None}, "PAIR-GEOMETRY"),
    ],
    ids=lambda value: str(value),
)
def test_a_target_of_other_sizes_is_unsafe_and_the_field_is_named(
    folders: Folders, sizes: dict[str, Any], rule: str
) -> None:
    shutil.rmtree(folders.target)
    write_target(folders.target, **sizes)
    verdict, rules = verdict_of(folders)
    assert verdict == "unsafe"
    assert rules[rule] == "error"


def test_a_target_of_another_depth_is_doubtful(folders: Folders) -> None:
    shutil.rmtree(folders.target)
    write_target(folders.target, layers=4)
    verdict, rules = verdict_of(folders)
    assert verdict == "doubtful"
    assert rules["PAIR-LAYERS"] == "warning"


def set_key(name: str, value: Any) -> Change:
    return lambda config: config.__setitem__(name, value)


def set_text(name: str, value: Any) -> Change:
    return lambda config: config["text_config"].__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "verdict", "rule"),
    [
        (set_key("model_type", "llama"), "unsafe", "PAIR-FAMILY"),
        (set_key("rope_theta", 10000.0), "doubtful", "PAIR-ROPE"),
        (set_key("eos_token_id", [1]), "doubtful", "PAIR-SPECIAL-IDS"),
        (set_key("n_shared_experts", 2), "unsafe", "PAIR-GEOMETRY"),
    ],
    ids=["family", "rope", "eos", "geometry"],
)
def test_a_change_in_the_target_config_is_found(
    folders: Folders, change: Change, verdict: str, rule: str
) -> None:
    folders.edit(folders.target, "config.json", change)
    found, rules = verdict_of(folders)
    assert found == verdict
    assert rule in rules


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (set_text("model_type", "glm4_moe"), "CONFIG-TEXT-MODEL-TYPE"),
        (lambda config: config.pop("text_config"), "CONFIG-TEXT-CONFIG"),
        (set_key("text_config", []), "CONFIG-TEXT-CONFIG"),
        (set_text("hidden_size", 0), "CONFIG-DIMENSION"),
        (set_text("kv_lora_rank", "64"), "CONFIG-DIMENSION"),
        (set_text("vocab_size", None), "CONFIG-DIMENSION"),
        (set_text("v_head_dim", 2**40), "CONFIG-DIMENSION"),
        (set_text("qk_rope_head_dim", 7), "CONFIG-ROPE-DIM"),
        (set_text("num_experts_per_tok", 0), "CONFIG-EXPERTS-PER-TOKEN"),
        (set_text("num_experts_per_tok", None), "CONFIG-EXPERTS-PER-TOKEN"),
        (set_key("block_size", 1), "CONFIG-BLOCK-SIZE"),
        (set_key("block_size", 20000), "CONFIG-BLOCK-SIZE"),
        (set_key("block_size", "4"), "CONFIG-BLOCK-SIZE"),
        (set_key("tie_word_embeddings", True), "CONFIG-TIED"),
        (set_key("quantization", {"bits": 7, "group_size": 64}), "CONFIG-QUANTIZATION"),
        (set_key("quantization", {"bits": 4, "group_size": 0}), "CONFIG-QUANTIZATION"),
        (set_key("model_type", "qwen3"), "DRAFTER-MODEL-TYPE"),
        (set_text("n_routed_experts", 4), "DRAFTER-TENSOR-SHAPE"),
        (set_text("hidden_size", 32), "DRAFTER-TENSOR-SHAPE"),
        (set_text("n_shared_experts", None), "DRAFTER-TENSOR-UNEXPECTED"),
        (set_text("q_lora_rank", None), "DRAFTER-TENSOR-MISSING"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_drafter_config_is_unsafe_alone_and_in_a_pair(
    folders: Folders, change: Change, rule: str
) -> None:
    folders.edit(folders.drafter, "config.json", change)
    for report in (api.validate(folders.target, folders.drafter), api.validate(folders.drafter)):
        assert check(report, load_schema("validate")) == []
        assert report["verdict"] == "unsafe"
        assert rule in [finding["rule"] for finding in report["findings"]]


@pytest.mark.parametrize(("key", "size"), [("attention_bias", "bias"), ("use_qk_norm", "qk_norm")])
@pytest.mark.parametrize("there", [True, False], ids=["there", "absent"])
def test_a_flag_that_the_tensors_set_right_makes_no_other_model(
    tmp_path: Path, key: str, size: str, there: bool
) -> None:
    raw = glm4_moe.write_checkpoint(tmp_path / "raw", **{size: there})
    edit_config(raw, lambda config: config.update({key: not there}))
    api.split_mtp(raw, tmp_path / "drafter")
    report = api.validate(raw, tmp_path / "drafter")
    assert report["verdict"] == "proven", report["findings"]


@pytest.mark.parametrize(("key", "size"), [("attention_bias", "bias"), ("use_qk_norm", "qk_norm")])
def test_a_drafter_without_what_its_targets_layers_have_was_cut_from_another_model(
    tmp_path: Path, key: str, size: str
) -> None:
    api.split_mtp(glm4_moe.write_checkpoint(tmp_path / "raw", **{size: False}), tmp_path / "drafter")
    target = glm4_moe.write_checkpoint(tmp_path / "target", head=False, **{size: True})
    report = api.validate(target, tmp_path / "drafter")
    (finding,) = [f for f in report["findings"] if f["rule"] == "PAIR-GEOMETRY"]
    assert f"{key} True and False" in finding["message"]


def test_a_flag_of_the_target_that_no_tensor_bears_out_is_not_compared(tmp_path: Path) -> None:
    raw = glm4_moe.write_checkpoint(tmp_path / "raw", bias=False)
    api.split_mtp(raw, tmp_path / "drafter")
    edit_config(raw, lambda config: config.update(attention_bias=True))
    rules = {finding["rule"] for finding in api.validate(raw, tmp_path / "drafter")["findings"]}
    assert "PAIR-GEOMETRY" not in rules


def swap_two_ids(document: Any) -> None:
    vocab = document["model"]["vocab"]
    vocab["t5"], vocab["t6"] = vocab["t6"], vocab["t5"]


def test_two_swapped_ids_are_unsafe_and_shown(folders: Folders) -> None:
    folders.edit(folders.target, "tokenizer.json", swap_two_ids)
    report = api.validate(folders.target, folders.drafter)
    assert report["verdict"] == "unsafe"
    finding = next(f for f in report["findings"] if f["rule"] == "PAIR-TOKENIZER")
    assert "t5" in finding["message"]
    assert "t6" in finding["message"]
    assert [d["id"] for d in report["facts"]["tokenizer"]["first_different"]] == [5, 6]


def test_a_tokenizer_with_more_ids_than_rows_is_unsafe(folders: Folders) -> None:
    for folder in (folders.target, folders.drafter):
        folders.edit(folder, "tokenizer.json", lambda document: document["model"]["vocab"].update(t64=64))
    verdict, rules = verdict_of(folders)
    assert verdict == "unsafe"
    assert rules["PAIR-VOCAB-ROWS"] == "error"


def test_a_missing_tokenizer_leaves_the_verdict_unknown(folders: Folders) -> None:
    (folders.drafter / "tokenizer.json").unlink()
    verdict, rules = verdict_of(folders)
    assert verdict == "unknown"
    assert "PAIR-TOKENIZER-UNKNOWN" in rules


def test_a_folder_of_no_known_family_leaves_the_verdict_unknown(folders: Folders) -> None:
    (folders.drafter / "config.json").write_text('{"model_type": "nonesuch"}')
    (folders.drafter / "model.safetensors.index.json").unlink()
    (folders.drafter / "model.safetensors").unlink()
    write_safetensors(folders.drafter / "model.safetensors", {"some.weight": (np.ones((2, 2)), "F32")})
    verdict, rules = verdict_of(folders)
    assert verdict == "unknown", rules
    assert "DRAFTER-FAMILY-UNKNOWN" in rules


@pytest.mark.parametrize("width", [2, 5, 16])
def test_a_width_is_checked_and_its_origin_said(folders: Folders, width: int) -> None:
    report = api.validate(folders.target, folders.drafter, draft_block_size=width)
    assert report["pair"]["block_size"] == width
    assert report["pair"]["block_size_from"] == "--draft-block-size"
    assert ("PAIR-BLOCK-DEPTH" in [f["rule"] for f in report["findings"]]) == (width > 2)


@pytest.mark.parametrize("width", [-1, 0, 1, 17, 20000])
def test_a_width_out_of_bounds_is_wrong_usage(folders: Folders, width: int) -> None:
    with pytest.raises(Usage, match=str(width)):
        api.validate(folders.target, folders.drafter, draft_block_size=width)


def test_a_damaged_shard_of_the_target_makes_the_pair_unsafe(folders: Folders) -> None:
    weights = folders.target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    verdict, rules = verdict_of(folders)
    assert verdict == "unsafe"
    assert rules["FILE-HEADER"] == "error"


@pytest.mark.parametrize("name", ["model.enorm.weight", "model.shared_head_norm.weight"])
def test_a_norm_edited_after_the_split_is_noticed(folders: Folders, name: str) -> None:
    drafter = open_checkpoint(folders.drafter)
    tensor = drafter.tensors[name]
    with (folders.drafter / tensor.file).open("r+b") as file:
        file.seek(tensor.begin)
        file.write(b"\0\0")
    verdict, rules = verdict_of(folders)
    assert verdict == "unsafe"
    assert rules["MANIFEST-TENSORS"] == "error"


def test_a_garbled_manifest_is_an_error_not_a_crash(folders: Folders) -> None:
    (folders.drafter / "draftpair-manifest.json").write_text('{"source": 3}')
    verdict, rules = verdict_of(folders)
    assert verdict == "unsafe"
    assert rules["MANIFEST-PARSE"] == "error"


def test_a_pair_runs_only_with_a_verdict_that_lets_it(folders: Folders) -> None:
    target, drafter = open_checkpoint(folders.target), open_checkpoint(folders.drafter)
    pair = validated_pair(target, drafter)
    assert (pair.block_size, pair.family.name) == (2, "glm4_moe_lite_mtp")
    shutil.rmtree(folders.raw)
    write_checkpoint(folders.raw, seed=1)
    stranger = open_checkpoint(folders.raw)
    with pytest.raises(Refused, match="doubtful"):
        validated_pair(stranger, drafter)
    assert validated_pair(stranger, drafter, allow_doubtful=True).verdict.name == "doubtful"
    verdict = validate_pair(stranger, drafter)
    with pytest.raises(Refused, match="PAIR-PROVENANCE"):
        ValidatedPair(stranger, drafter, pair.family, 2, "a test", verdict)
    with pytest.raises(ToolError, match="not about"):
        ValidatedPair(stranger, drafter, pair.family, 2, "a test", pair.verdict)
    with pytest.raises(ToolError):
        validated_pair(target, target)


def test_no_flag_runs_an_unsafe_pair(folders: Folders) -> None:
    folders.edit(folders.target, "config.json", set_key("model_type", "llama"))
    with pytest.raises(Refused, match="PAIR-FAMILY"):
        validated_pair(open_checkpoint(folders.target), open_checkpoint(folders.drafter), allow_doubtful=True)
