"""Muse Glimmer's assistant: its tensors as other implementations have them, its width, and its faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import ConfigView, open_checkpoint
from draftpair.families import load_families
from draftpair.families.drafters import find_drafter, output_shapes
from draftpair.families.views import canonical, declared_width
from fixtures import glm4_moe_lite
from fixtures.goldens import load_goldens
from fixtures.muse_glimmer_assistant import FAMILY, write_drafter, write_target
from fixtures.split_heads import Change, altered, copied, edit_config, edit_tensors, judged, removed
from fixtures.weights import write_json

GOLDENS = load_goldens(Path(__file__).parents[2] / "fixtures" / f"{FAMILY}.golden.json")
Edit = Callable[[dict[str, Any]], object]


def edited(folder: Path, change: Edit) -> Path:
    edit_config(folder, change)
    return folder


@pytest.mark.parametrize("spelling", ["config", "saved"])
@pytest.mark.parametrize("variant", GOLDENS)
def test_tensors_and_shapes_are_those_of_transformers_and_mlx_vlm(
    tmp_path: Path, variant: str, spelling: str
) -> None:
    golden = GOLDENS[variant]
    write_json(tmp_path / "config.json", golden[spelling])
    checkpoint, record = open_checkpoint(tmp_path), load_families()[FAMILY]
    shapes = output_shapes(record, checkpoint, canonical(record, checkpoint.config)[0])
    assert {name: list(shape) for name, shape in shapes.items()} == golden["tensors"]


def test_the_published_assistant_has_58_tensors() -> None:
    assert len(GOLDENS["30B"]["tensors"]) == 58
    assert GOLDENS["30B"]["tensors"]["encoder.fc.weight"] == [6656, 33280]


@pytest.mark.parametrize("options", [{}, {"group_size": 32}, {"taps": (2,)}, {"hidden": 32}], ids=str)
def test_an_assistant_as_published_or_converted_is_sound(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_drafter(tmp_path / "drafter", **options)
    assert judged(folder) == ("sound", {})
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name == FAMILY


@pytest.mark.parametrize("value", [[], None])
def test_layer_types_may_be_left_to_the_engine(tmp_path: Path, value: object) -> None:
    folder = write_drafter(tmp_path / "drafter")
    assert judged(edited(folder, lambda config: config.update(layer_types=value))) == ("sound", {})


def test_what_stands_in_dflash_config_is_read_and_must_agree(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")
    nested = {"target_layer_ids": [1, 4, 6], "mask_token_id": 280}

    def move(config: dict[str, Any]) -> None:
        config["dflash_config"] = nested
        del config["target_layer_ids"]

    assert judged(edited(folder, move)) == ("sound", {})
    verdict, said = judged(edited(folder, lambda config: config.update(mask_token_id=7)))
    assert verdict == "unsafe"
    assert "/mask_token_id" in said["CONFIG-CONFLICT"][1]


def test_a_fault_points_at_where_the_key_stands(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")

    def move(config: dict[str, Any]) -> None:
        config["dflash_config"] = {"target_layer_ids": config.pop("target_layer_ids")[::-1]}

    _, said = judged(edited(folder, move))
    assert said["DRAFTER-TAPS"][1].startswith("config.json#/dflash_config/target_layer_ids")


def test_without_its_type_the_tensors_tell_it_and_the_type_is_asked_for(tmp_path: Path) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), lambda config: config.pop("model_type"))
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name == FAMILY
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert "model_type" in said["CONFIG-MODEL-TYPE"][1]


@pytest.mark.parametrize("declared", ["muse_glimmer", "qwen3", "gemma4_assistant"])
def test_a_type_that_the_tensors_contradict_is_said(tmp_path: Path, declared: str) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), lambda config: config.update(model_type=declared))
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert declared in said["DRAFTER-MODEL-TYPE"][1]


CONFIG_FAULTS: dict[str, tuple[Edit, str, str]] = {
    "no width": (lambda config: config.pop("hidden_size"), "CONFIG-DIMENSION", "hidden_size"),
    "no layers": (lambda config: config.update(num_hidden_layers=0), "CONFIG-DIMENSION", "num_hidden_layers"),
    "an enormous width": (
        lambda config: config.update(intermediate_size=1 << 25),
        "CONFIG-DIMENSION",
        "intermediate_size",
    ),
    "heads that do not divide": (
        lambda config: config.update(num_key_value_heads=3),
        "CONFIG-HEADS",
        "num_key_value_heads",
    ),
    "a layer of full attention": (
        lambda config: config.update(
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "CONFIG-LAYER-TYPES",
        "layer_types/1",
    ),
    "fewer layer types than layers": (
        lambda config: config.update(layer_types=["sliding_attention"]),
        "CONFIG-LAYER-TYPES",
        "layer_types",
    ),
    "no window": (lambda config: config.pop("sliding_window"), "CONFIG-WINDOW", "sliding_window"),
    "no taps": (lambda config: config.pop("target_layer_ids"), "CONFIG-TAPS", "target_layer_ids"),
    "a tap that is no layer": (
        lambda config: config.update(target_layer_ids=[1, -4, 6]),
        "CONFIG-TAPS",
        "target_layer_ids/1",
    ),
    "taps out of order": (
        lambda config: config.update(target_layer_ids=[4, 1, 6]),
        "DRAFTER-TAPS",
        "target_layer_ids",
    ),
    "a tap twice": (
        lambda config: config.update(target_layer_ids=[1, 4, 4]),
        "DRAFTER-TAPS",
        "target_layer_ids",
    ),
    "fewer taps than layers": (
        lambda config: config.update(target_layer_ids=[1, 4]),
        "DRAFTER-TAPS",
        "target_layer_ids",
    ),
    "a tap past the declared depth": (
        lambda config: config.update(num_target_layers=6),
        "DRAFTER-TAPS",
        "num_target_layers",
    ),
    "a block without a proposal": (
        lambda config: config.update(block_size=1),
        "CONFIG-BLOCK-SIZE",
        "block_size",
    ),
    "a runtime block without one": (
        lambda config: config.update(runtime_block_size=0),
        "CONFIG-RUNTIME-BLOCK",
        "runtime_block_size",
    ),
    "no mask token": (lambda config: config.pop("mask_token_id"), "CONFIG-MASK-TOKEN", "mask_token_id"),
    "a negative mask token": (
        lambda config: config.update(mask_token_id=-1),
        "CONFIG-MASK-TOKEN",
        "mask_token_id",
    ),
    "a mask token past the vocabulary": (
        lambda config: config.update(vocab_size=280),
        "CONFIG-MASK-VOCABULARY",
        "mask_token_id",
    ),
    "a scaled rotation": (
        lambda config: config["rope_parameters"].update(rope_type="yarn"),
        "CONFIG-ROPE",
        "rope_parameters",
    ),
    "another activation": (
        lambda config: config.update(hidden_act="gelu"),
        "CONFIG-ACTIVATION",
        "hidden_act",
    ),
    "biases": (lambda config: config.update(attention_bias=True), "CONFIG-BIAS", "attention_bias"),
    "a packing of another kind": (
        lambda config: config.update(quantization_config={"quant_method": "compressed-tensors"}),
        "CONFIG-QUANTIZATION-FOREIGN",
        "quantization_config: the weights are packed by compressed-tensors",
    ),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_wrong_config_is_unsafe_and_the_key_is_named(tmp_path: Path, fault: str) -> None:
    change, rule, key = CONFIG_FAULTS[fault]
    verdict, said = judged(edited(write_drafter(tmp_path / "drafter"), change))
    assert verdict == "unsafe"
    assert said[rule][0] == "error"
    assert key in said[rule][1]


@pytest.mark.parametrize("value", [None, {}, "x", 1.5, True, [None], [[1]]])
@pytest.mark.parametrize(
    "key", ["target_layer_ids", "layer_types", "dflash_config", "block_size", "mask_token_id"]
)
def test_no_value_of_a_wrong_type_breaks_the_check(tmp_path: Path, key: str, value: object) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), lambda config: config.update({key: value}))
    assert judged(folder)[0] in ("sound", "doubtful", "unsafe")


TENSOR_FAULTS: dict[str, tuple[Change, str, str]] = {
    "the projection of the taps missing": (
        removed("encoder.fc.weight"),
        "DRAFTER-TENSOR-MISSING",
        "encoder.fc.weight",
    ),
    "a norm missing": (
        removed("layers.1.self_attn.k_norm.weight"),
        "DRAFTER-TENSOR-MISSING",
        "layers.1.self_attn.k_norm",
    ),
    "an embedding of its own": (
        copied("layers.0.mlp.up_proj.weight", "embed_tokens.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "embed_tokens.weight",
    ),
    "a gate as the target has": (
        copied("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.gate_proj.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "layers.0.self_attn.gate_proj.weight",
    ),
    "a projection for another number of taps": (
        altered("encoder.fc.weight", lambda words: words[:, :128]),
        "DRAFTER-TENSOR-SHAPE",
        "encoder.fc.weight",
    ),
    "values that are not numbers": (
        altered("norm.weight", lambda words: np.full_like(words, 0x7FC0)),
        "DRAFTER-TENSOR-VALUES",
        "norm.weight",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_damaged_file_is_unsafe_and_the_tensor_is_named(tmp_path: Path, fault: str) -> None:
    change, rule, name = TENSOR_FAULTS[fault]
    folder = write_drafter(tmp_path / "drafter")
    edit_tensors(folder, change)
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert said[rule][0] == "error"
    assert name in said[rule][1]


def test_an_unstated_rotation_is_pointed_out(tmp_path: Path) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), lambda config: config.pop("rope_parameters"))
    verdict, said = judged(folder)
    assert (verdict, set(said)) == ("doubtful", {"CONFIG-ROPE-UNSTATED"})


@pytest.mark.parametrize(
    ("stated", "rows"),
    [
        ({"block_size": 16}, 16),
        ({"block_size": 16, "runtime_block_size": 4}, 4),
        ({"block_size": 8, "runtime_block_size": 16}, 8),
        ({"block_size": 8, "runtime_block_size": None}, 8),
        ({"runtime_block_size": 4}, None),
        ({"block_size": "8"}, None),
    ],
)
def test_the_smaller_of_both_widths_is_verified(stated: dict[str, Any], rows: int | None) -> None:
    width = declared_width(load_families()[FAMILY], ConfigView(stated))
    assert (width[0] if width else None) == rows


# --- pairs ---


@pytest.mark.parametrize("options", [{}, {"group_size": 32}], ids=str)
def test_the_pair_that_belongs_together_is_compatible(tmp_path: Path, options: dict[str, Any]) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter", **options)
    assert judged(target, drafter) == ("compatible", {})
    report = api.validate(target, drafter)
    assert report["pair"]["block_size"] == 8
    assert report["facts"]["block_size"]["counts_bonus_token"] is True
    assert report["facts"]["drafter"]["borrows"] == ["embedding", "head"]
    assert report["facts"]["taps"]["last"] == 6


PAIR_FAULTS: dict[str, tuple[dict[str, Any], Edit, str, str]] = {
    "another hidden width": ({"hidden": 96}, lambda config: None, "PAIR-HIDDEN-SIZE", "96"),
    "a tap past its depth": ({"layers": 6}, lambda config: None, "PAIR-TAPS", "id 6"),
    "another depth than stated": (
        {"layers": 12},
        lambda config: config.update(num_target_layers=8),
        "PAIR-TARGET-LAYERS",
        "8",
    ),
    "another vocabulary than stated": (
        {"vocab": 320},
        lambda config: config.update(vocab_size=288),
        "PAIR-VOCAB-SIZE",
        "288",
    ),
    "no row for the mask token": ({"vocab": 276}, lambda config: None, "PAIR-MASK", "mask token id 280"),
}


@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_another_target_is_refused_and_the_difference_named(tmp_path: Path, fault: str) -> None:
    sizes, change, rule, named = PAIR_FAULTS[fault]
    target = write_target(tmp_path / "target", **sizes)
    verdict, said = judged(target, edited(write_drafter(tmp_path / "drafter"), change))
    assert verdict == "unsafe"
    assert said[rule][0] == "error"
    assert named in said[rule][1]


def test_a_target_without_an_output_matrix_is_refused(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    edit_tensors(target, removed("lm_head.weight"))
    verdict, said = judged(target, drafter)
    assert verdict == "unsafe"
    assert "head" in said["PAIR-BORROWED"][1]


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter")
    verdict, said = judged(glm4_moe_lite.write_target(tmp_path / "other"), drafter)
    assert verdict == "unsafe"
    assert "glm4_moe_lite" in said["PAIR-FAMILY"][1]


def test_the_folder_says_nothing_of_a_vocabulary_and_that_is_noted(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    assert "vocab_size" not in json.loads((drafter / "config.json").read_text())
    notes = {f["rule"] for f in api.validate(target, drafter)["findings"] if f["level"] == "note"}
    assert {"PAIR-VOCAB-UNSTATED", "PAIR-TOKENIZER-ABSENT"} <= notes
