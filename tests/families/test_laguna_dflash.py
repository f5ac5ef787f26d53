"""Laguna's DFlash drafters: their tensors as mlx-vlm and the published file have them, and their faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.families import load_families
from draftpair.families.drafters import find_drafter, output_shapes
from draftpair.families.views import canonical
from fixtures import glm4_moe_lite
from fixtures.goldens import load_goldens
from fixtures.laguna_dflash import write_drafter, write_target
from fixtures.split_heads import Change, altered, copied, edit_config, edit_tensors, judged, removed
from fixtures.weights import write_json

FAMILY = "laguna_dflash"
GOLDENS = load_goldens(Path(__file__).parents[2] / "fixtures" / f"{FAMILY}.golden.json")
Edit = Callable[[dict[str, Any]], object]


def edited(folder: Path, change: Edit) -> Path:
    edit_config(folder, change)
    return folder


def dflash(**values: Any) -> Edit:
    """Changes keys of dflash_config."""
    return lambda config: config["dflash_config"].update(values)


def shapes_for(folder: Path, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    write_json(folder / "config.json", config)
    checkpoint, record = open_checkpoint(folder), load_families()[FAMILY]
    return output_shapes(record, checkpoint, canonical(record, checkpoint.config)[0])


@pytest.mark.parametrize("variant", GOLDENS)
def test_tensors_and_shapes_are_those_of_mlx_vlm(tmp_path: Path, variant: str) -> None:
    golden = GOLDENS[variant]
    shapes = shapes_for(tmp_path, golden["config"])
    assert {name: list(shape) for name, shape in shapes.items()} == golden["tensors"]


def test_the_published_file_of_s_is_made_up_to_the_byte(tmp_path: Path) -> None:
    """Laguna-S-2.1-DFlash is published as 1,114,977,792 BF16 numbers in a file of 2,229,962,896 bytes."""
    shapes = shapes_for(tmp_path, GOLDENS["S-2.1"]["config"])
    assert sum(map(prod, shapes.values())) == 1_114_977_792
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = len(json.dumps(header, separators=(",", ":")))
    assert 8 + text + -text % 8 + end == 2_229_962_896


@pytest.mark.parametrize(
    "options",
    [{}, {"joined": False}, {"group_size": 32}, {"joined": False, "group_size": 32}, {"taps": (5,)}],
    ids=str,
)
def test_a_drafter_as_published_or_converted_is_sound(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_drafter(tmp_path / "drafter", **options)
    assert judged(folder) == ("sound", {})
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name == FAMILY


def test_windows_by_layer_that_agree_are_sound(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")
    assert judged(edited(folder, lambda config: config.update(sliding_windows=[16, 16, 16]))) == ("sound", {})


# --- a drafter and its target declare the same type ---


def test_a_target_is_no_drafter_and_a_drafter_no_target(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    types = [json.loads((folder / "config.json").read_text())["model_type"] for folder in (target, drafter)]
    assert types == ["laguna", "laguna"]
    assert find_drafter(open_checkpoint(target)) is None
    assert judged(target)[0] == "sound"
    verdict, said = judged(drafter, drafter)
    assert verdict == "unsafe"
    assert "PAIR-TARGET-ROLE" in said


def test_drafter_and_target_swapped_are_refused(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    verdict, said = judged(drafter, target)
    assert verdict == "unsafe"
    assert "PAIR-TARGET-ROLE" in said


def strip(config: dict[str, Any]) -> None:
    """Leaves nothing in a config that marks a drafter."""
    del config["architectures"], config["dflash_config"]


def test_the_tensors_tell_a_drafter_whose_config_could_be_a_targets(tmp_path: Path) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), strip)
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name == FAMILY
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert "laguna" in said["DRAFTER-MODEL-TYPE"][1]
    assert said["CONFIG-DFLASH"][0] == "error"


def test_a_target_with_a_drafters_config_lacks_its_tensors(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    (target / "config.json").write_bytes((drafter / "config.json").read_bytes())
    verdict, said = judged(target)
    assert verdict == "unsafe"
    assert said["DRAFTER-TENSORS"][0] == "error"


def test_without_its_type_the_tensors_tell_it_and_the_type_is_asked_for(tmp_path: Path) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), lambda config: config.pop("model_type"))
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name == FAMILY
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert "model_type" in said["CONFIG-MODEL-TYPE"][1]


@pytest.mark.parametrize("declared", ["qwen3", "muse_glimmer_assistant"])
def test_another_type_is_refused(tmp_path: Path, declared: str) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), lambda config: config.update(model_type=declared))
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert declared in said["CONFIG-MODEL-TYPE"][1]
    assert declared in said["DRAFTER-MODEL-TYPE"][1]


CONFIG_FAULTS: dict[str, tuple[Edit, str, str]] = {
    "architectures of the target": (
        lambda config: config.update(architectures=["LagunaForCausalLM"]),
        "CONFIG-ARCHITECTURE",
        "architectures",
    ),
    "no dflash_config": (lambda config: config.pop("dflash_config"), "CONFIG-DFLASH", "dflash_config"),
    "a dflash_config without taps": (
        lambda config: config["dflash_config"].pop("target_layer_ids"),
        "CONFIG-DFLASH",
        "target_layer_ids",
    ),
    "no width": (lambda config: config.pop("hidden_size"), "CONFIG-DIMENSION", "hidden_size"),
    "heads that do not divide": (
        lambda config: config.update(num_key_value_heads=3),
        "CONFIG-HEADS",
        "num_key_value_heads",
    ),
    "heads too narrow to turn": (lambda config: config.update(head_dim=1), "CONFIG-HEAD-DIM", "head_dim"),
    "no layer types": (lambda config: config.pop("layer_types"), "CONFIG-LAYER-TYPES", "layer_types"),
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
    "a window of one": (lambda config: config.update(sliding_window=1), "CONFIG-WINDOW", "sliding_window"),
    "windows that differ": (
        lambda config: config.update(sliding_windows=[16, 8, 16]),
        "CONFIG-WINDOW",
        "sliding_windows",
    ),
    "fewer windows than layers": (
        lambda config: config.update(sliding_windows=[16]),
        "CONFIG-WINDOW",
        "sliding_windows",
    ),
    "a gate for every channel": (
        lambda config: config.update(gating="per-element"),
        "CONFIG-GATING",
        "gating",
    ),
    "no gate": (lambda config: config.update(gating=False), "CONFIG-GATING", "gating"),
    "experts": (lambda config: config.update(num_experts=256), "CONFIG-EXPERTS", "num_experts"),
    "no base of the rotation": (lambda config: config.pop("rope_theta"), "CONFIG-ROPE", "rope_theta"),
    "a smaller vocabulary": (
        lambda config: config.update(draft_vocab_size=100),
        "CONFIG-DRAFT-VOCABULARY",
        "draft_vocab_size",
    ),
    "a larger vocabulary": (
        lambda config: config.update(draft_vocab_size=400),
        "CONFIG-DRAFT-VOCABULARY",
        "draft_vocab_size",
    ),
    "no vocabulary of its own stated": (
        lambda config: config.pop("draft_vocab_size"),
        "CONFIG-DRAFT-VOCABULARY",
        "draft_vocab_size",
    ),
    "not causal": (dflash(causal=False), "CONFIG-CAUSAL", "dflash_config/causal"),
    "a block without a proposal": (dflash(block_size=1), "CONFIG-BLOCK-SIZE", "dflash_config/block_size"),
    "a negative mask token": (dflash(mask_token_id=-1), "CONFIG-MASK-TOKEN", "dflash_config/mask_token_id"),
    "a mask token past the vocabulary": (
        dflash(mask_token_id=288),
        "CONFIG-MASK-VOCABULARY",
        "dflash_config/mask_token_id",
    ),
    "taps out of order": (
        dflash(target_layer_ids=[2, 1, 4]),
        "DRAFTER-TAPS",
        "dflash_config/target_layer_ids",
    ),
    "fewer taps than layers": (
        dflash(target_layer_ids=[1, 2]),
        "DRAFTER-TAPS",
        "dflash_config/target_layer_ids",
    ),
    "a tap past the declared depth": (dflash(num_target_layers=4), "DRAFTER-TAPS", "num_target_layers"),
    "taps counted otherwise by vLLM": (
        lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        "CONFIG-TAPS-AUXILIARY",
        "eagle_aux_hidden_state_layer_ids",
    ),
    "ids of endless length": (
        lambda config: config.update(eagle_aux_hidden_state_layer_ids=["x" * 100_000]),
        "CONFIG-TAPS-AUXILIARY",
        "eagle_aux_hidden_state_layer_ids",
    ),
    "two block sizes": (lambda config: config.update(block_size=8), "CONFIG-CONFLICT", "block_size"),
    "biases": (lambda config: config.update(qkv_bias=True), "CONFIG-BIAS", "qkv_bias"),
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


@pytest.mark.parametrize(
    ("change", "rule", "engine"),
    [
        (lambda config: config.update(gating=True), "CONFIG-GATING-SPELLING", "mlx-vlm"),
        (
            lambda config: config.update(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
            "CONFIG-ROPE-OBJECT",
            "mlxcel",
        ),
        (
            lambda config: config.pop("eagle_aux_hidden_state_layer_ids"),
            "CONFIG-AUX-LAYERS",
            "mlx-vlm",
        ),
    ],
)
def test_what_only_some_engines_take_is_pointed_out(
    tmp_path: Path, change: Edit, rule: str, engine: str
) -> None:
    verdict, said = judged(edited(write_drafter(tmp_path / "drafter"), change))
    assert (verdict, set(said)) == ("doubtful", {rule})
    assert engine in said[rule][1]


@pytest.mark.parametrize("value", [None, [], {}, "x", 1.5, True, [None], [[1]]])
@pytest.mark.parametrize(
    "key",
    [
        "dflash_config",
        "layer_types",
        "sliding_windows",
        "num_hidden_layers",
        "eagle_aux_hidden_state_layer_ids",
    ],
)
def test_no_value_of_a_wrong_type_breaks_the_check(tmp_path: Path, key: str, value: object) -> None:
    folder = edited(write_drafter(tmp_path / "drafter"), lambda config: config.update({key: value}))
    assert judged(folder)[0] in ("sound", "doubtful", "unsafe")


TENSOR_FAULTS: dict[str, tuple[Change, str, str]] = {
    "a norm of a tap missing": (
        removed("aux_hidden_norms.2.weight"),
        "DRAFTER-TENSOR-MISSING",
        "aux_hidden_norms.2.weight",
    ),
    "a norm of a fourth tap": (
        copied("aux_hidden_norms.2.weight", "aux_hidden_norms.3.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "aux_hidden_norms.3.weight",
    ),
    "a gate missing": (
        removed("layers.1.self_attn.g_proj.weight"),
        "DRAFTER-TENSOR-MISSING",
        "layers.1.self_attn.g_proj.weight",
    ),
    "queries beside the joined matrix": (
        copied("layers.0.self_attn.o_proj.weight", "layers.0.self_attn.q_proj.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "layers.0.self_attn.q_proj.weight",
    ),
    "the joined matrix too short": (
        altered("layers.0.self_attn.qkv_proj.weight", lambda words: words[:96]),
        "DRAFTER-TENSOR-SHAPE",
        "layers.0.self_attn.qkv_proj.weight",
    ),
    "a projection for another number of taps": (
        altered("fc.weight", lambda words: words[:, :128]),
        "DRAFTER-TENSOR-SHAPE",
        "fc.weight",
    ),
    "an embedding of its own": (
        copied("fc.weight", "embed_tokens.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "embed_tokens.weight",
    ),
    "values that are not numbers": (
        altered("hidden_norm.weight", lambda words: np.full_like(words, 0x7FC0)),
        "DRAFTER-TENSOR-VALUES",
        "hidden_norm.weight",
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


def test_values_missing_beside_separate_queries_are_missed(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", joined=False)
    edit_tensors(folder, removed("layers.0.self_attn.v_proj.weight"))
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert "layers.0.self_attn.v_proj.weight" in said["DRAFTER-TENSOR-MISSING"][1]


# --- pairs ---


@pytest.mark.parametrize("options", [{}, {"joined": False}, {"group_size": 32}], ids=str)
def test_the_pair_that_belongs_together_is_compatible(tmp_path: Path, options: dict[str, Any]) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter", **options)
    assert judged(target, drafter) == ("compatible", {})
    report = api.validate(target, drafter)
    assert report["pair"]["block_size"] == 16
    assert report["facts"]["block_size"]["counts_bonus_token"] is True
    assert report["facts"]["drafter"]["borrows"] == ["embedding", "head"]
    notes = {finding["rule"]: finding["message"] for finding in report["findings"]}
    assert "NVFP4" in notes["PAIR-LOOKALIKES"]


def test_a_drafter_that_taps_the_last_layer_is_noted(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter", taps=(1, 3, 5))
    report = api.validate(target, drafter)
    assert report["verdict"] == "compatible"
    assert "PAIR-TAP-LAST" in {finding["rule"] for finding in report["findings"]}


PAIR_FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another hidden width": ({"hidden": 96}, "PAIR-HIDDEN-SIZE", "96"),
    "another depth": ({"layers": 8}, "PAIR-TARGET-LAYERS", "8"),
    "a tap past its depth": ({"layers": 4}, "PAIR-TAPS", "id 4"),
    "another vocabulary": ({"vocab": 320}, "PAIR-VOCAB-SIZE", "320"),
}


@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_another_target_is_refused_and_the_difference_named(tmp_path: Path, fault: str) -> None:
    sizes, rule, named = PAIR_FAULTS[fault]
    target, drafter = write_target(tmp_path / "target", **sizes), write_drafter(tmp_path / "drafter")
    verdict, said = judged(target, drafter)
    assert verdict == "unsafe"
    assert said[rule][0] == "error"
    assert named in said[rule][1]


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter")
    verdict, said = judged(glm4_moe_lite.write_target(tmp_path / "other"), drafter)
    assert verdict == "unsafe"
    assert "glm4_moe_lite" in said["PAIR-FAMILY"][1]
