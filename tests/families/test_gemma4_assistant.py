"""Gemma 4's assistants, of models with towers and without: tensors as other implementations have them, and faults."""

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
from draftpair.families.views import canonical, of_layer
from fixtures import glm4_moe_lite
from fixtures.gemma4_assistant import (
    FULL,
    SLIDING,
    TARGET_CLASSES,
    drafter_config,
    rope,
    write_drafter,
    write_target,
)
from fixtures.goldens import load_goldens
from fixtures.split_heads import Change, altered, copied, edit_tensors, judged, removed
from fixtures.weights import write_json

FAMILIES = ("gemma4_assistant", "gemma4_unified_assistant")
GOLDENS = {
    family: load_goldens(Path(__file__).parents[2] / "fixtures" / f"{family}.golden.json")
    for family in FAMILIES
}
ORDERING = "masked_embedding.token_ordering"
Edit = Callable[[dict[str, Any], dict[str, Any]], object]


def edit(folder: Path, change: Edit) -> Path:
    """Change a folder's config.json; `change` is given the root and its text_config."""
    config = json.loads((folder / "config.json").read_text())
    change(config, config["text_config"])
    write_json(folder / "config.json", config)
    return folder


@pytest.mark.parametrize("spelling", ["config", "saved"])
@pytest.mark.parametrize(
    ("family", "variant"), [(family, variant) for family in FAMILIES for variant in GOLDENS[family]]
)
def test_tensors_and_shapes_are_those_of_transformers_and_mlx_vlm(
    tmp_path: Path, family: str, variant: str, spelling: str
) -> None:
    golden = GOLDENS[family][variant]
    write_json(tmp_path / "config.json", golden[spelling])
    checkpoint, record = open_checkpoint(tmp_path), load_families()[family]
    config, findings = canonical(record, checkpoint.config)
    shapes = output_shapes(record, checkpoint, config)
    assert {name: list(shape) for name, shape in shapes.items()} == golden["tensors"]
    assert findings == []


def test_the_recorded_variants_differ_in_what_sizes_tensors() -> None:
    assert {len(golden["tensors"]) for golden in GOLDENS["gemma4_assistant"].values()} == {26, 48, 49, 50}
    published = GOLDENS["gemma4_assistant"]["31B"]["tensors"]
    assert published["model.layers.0.self_attn.q_proj.weight"] == [32 * 256, 1024]
    assert published["model.layers.3.self_attn.q_proj.weight"] == [32 * 512, 1024]
    assert published["pre_projection.weight"] == [1024, 2 * 5376]


def test_keys_and_values_of_the_published_31b_by_layer() -> None:
    record = load_families()["gemma4_assistant"]
    for spelling in ("config", "saved"):
        config = canonical(record, ConfigView(GOLDENS["gemma4_assistant"]["31B"][spelling]))[0]
        layers = [of_layer(record, config, number) for number in range(4)]
        assert [layer.get("num_key_value_heads") for layer in layers] == [16, 16, 16, 4]
        assert [layer.get("head_dim") for layer in layers] == [256, 256, 256, 512]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ordered": True},
        {"tied": False},
        {"groups": 4, "global_groups": 1, "keys_are_values": True},
        {"group_size": 32},
        {"group_size": 32, "ordered": True},
        {"group_size": 64, "tied": False},
    ],
    ids=str,
)
def test_an_assistant_as_published_or_converted_is_sound(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    folder = write_drafter(tmp_path / "drafter", family=family, **options)
    assert judged(folder) == ("sound", {})
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name == family


@pytest.mark.parametrize("dtype", ["<i8", "<i4"])
def test_the_order_of_the_tokens_may_have_64_or_32_bits(tmp_path: Path, dtype: str) -> None:
    folder = write_drafter(tmp_path / "drafter", ordered=True)
    kind = {"<i8": "I64", "<i4": "I32"}[dtype]
    edit_tensors(folder, lambda words: words.update({ORDERING: (words[ORDERING][0].astype(dtype), kind)}))
    assert judged(folder) == ("sound", {})


def test_what_transformers_saves_is_read_and_what_mlx_vlm_misses_is_said(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")

    def resave(root: dict[str, Any], text: dict[str, Any]) -> None:
        del text["num_global_key_value_heads"]
        text["per_layer_config"] = {"3": {"head_dim": text.pop("global_head_dim")}}

    verdict, said = judged(edit(folder, resave))
    assert verdict == "doubtful"
    assert set(said) == {"CONFIG-HEAD-DIM-SPELLING"}
    assert "512" in said["CONFIG-HEAD-DIM-SPELLING"][1]
    verdict, said = judged(edit(folder, lambda root, text: text.update(global_head_dim=16)))
    assert verdict == "unsafe"
    assert "/text_config/per_layer_config/3/head_dim" in said["CONFIG-CONFLICT"][1]


@pytest.mark.parametrize("shared", [0, None, 4])
def test_nothing_and_zero_stand_for_all_layers_sharing(tmp_path: Path, shared: int | None) -> None:
    folder = write_drafter(tmp_path / "drafter")
    assert judged(edit(folder, lambda root, text: text.update(num_kv_shared_layers=shared))) == ("sound", {})


def test_without_its_type_the_tensors_tell_it_and_the_type_is_asked_for(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", family="gemma4_unified_assistant")
    edit(folder, lambda root, text: root.pop("model_type"))
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name == "gemma4_unified_assistant"
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert "model_type" in said["CONFIG-MODEL-TYPE"][1]
    edit(folder, lambda root, text: root.pop("architectures"))
    found = find_drafter(open_checkpoint(folder))
    assert found is not None
    assert found.family.name in FAMILIES
    assert "DRAFTER-MODEL-TYPE" in judged(folder)[1]


@pytest.mark.parametrize("declared", ["gemma4", "qwen3_5_mtp", "muse_glimmer_assistant"])
def test_a_type_that_the_tensors_contradict_is_said(tmp_path: Path, declared: str) -> None:
    folder = write_drafter(tmp_path / "drafter")
    verdict, said = judged(edit(folder, lambda root, text: root.update(model_type=declared)))
    assert verdict == "unsafe"
    assert declared in said["DRAFTER-MODEL-TYPE"][1]


def test_a_type_without_the_tensors_is_said(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    edit(folder, lambda root, text: root.update(model_type="gemma4_assistant"))
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert said["DRAFTER-TENSORS"][0] == "error"


def test_a_target_is_no_drafter(tmp_path: Path) -> None:
    assert find_drafter(open_checkpoint(write_target(tmp_path / "target"))) is None


CONFIG_FAULTS: dict[str, tuple[Edit, str, str]] = {
    "no text_config": (
        lambda root, text: root.update(text_config=None),
        "CONFIG-TEXT-CONFIG",
        "text_config",
    ),
    "the text model of another": (
        lambda root, text: text.update(model_type="qwen3_5_text"),
        "CONFIG-TEXT-MODEL-TYPE",
        "text_config/model_type",
    ),
    "no width of the target": (
        lambda root, text: root.pop("backbone_hidden_size"),
        "CONFIG-BACKBONE",
        "backbone_hidden_size",
    ),
    "no layers": (
        lambda root, text: text.update(num_hidden_layers=0),
        "CONFIG-DIMENSION",
        "num_hidden_layers",
    ),
    "a width that is a text": (
        lambda root, text: text.update(hidden_size="64"),
        "CONFIG-DIMENSION",
        "hidden_size",
    ),
    "no layer types": (
        lambda root, text: text.pop("layer_types"),
        "CONFIG-LAYER-TYPES",
        "layer_types",
    ),
    "a third kind of layer": (
        lambda root, text: text.update(layer_types=[SLIDING, SLIDING, "linear_attention", FULL]),
        "CONFIG-LAYER-TYPES",
        "layer_types/2",
    ),
    "fewer layer types than layers": (
        lambda root, text: text.update(layer_types=[SLIDING, FULL]),
        "CONFIG-LAYER-TYPES",
        "layer_types",
    ),
    "no width of full attention": (
        lambda root, text: text.pop("global_head_dim"),
        "CONFIG-HEAD-DIM",
        "global_head_dim",
    ),
    "some layers with keys of their own": (
        lambda root, text: text.update(num_kv_shared_layers=2),
        "CONFIG-KV-SHARING",
        "num_kv_shared_layers",
    ),
    "heads that do not divide": (
        lambda root, text: text.update(num_key_value_heads=3),
        "CONFIG-HEADS",
        "num_key_value_heads",
    ),
    "a rotation without a base": (
        lambda root, text: text.update(rope_parameters={**rope(), SLIDING: {"rope_type": "default"}}),
        "CONFIG-ROPE",
        "rope_parameters/sliding_attention",
    ),
    "a layer type without a rotation": (
        lambda root, text: text["rope_parameters"].pop(FULL),
        "CONFIG-ROPE",
        "rope_parameters",
    ),
    "inputs by layer": (
        lambda root, text: text.update(hidden_size_per_layer_input=256),
        "CONFIG-PER-LAYER-INPUT",
        "hidden_size_per_layer_input",
    ),
    "experts": (
        lambda root, text: text.update(enable_moe_block=True),
        "CONFIG-EXPERTS",
        "enable_moe_block",
    ),
    "a doubled feed-forward": (
        lambda root, text: text.update(use_double_wide_mlp=True),
        "CONFIG-DOUBLE-WIDE",
        "use_double_wide_mlp",
    ),
    "another activation": (
        lambda root, text: text.update(hidden_activation="silu"),
        "CONFIG-ACTIVATION",
        "hidden_activation",
    ),
    "biases": (lambda root, text: text.update(attention_bias=True), "CONFIG-BIAS", "attention_bias"),
    "a block without a proposal": (
        lambda root, text: root.update(block_size=1),
        "CONFIG-BLOCK-SIZE",
        "block_size",
    ),
    "a tie that is a text": (
        lambda root, text: root.update(tie_word_embeddings="no"),
        "CONFIG-TIED",
        "tie_word_embeddings",
    ),
    "untied without an output matrix": (
        lambda root, text: root.update(tie_word_embeddings=False),
        "DRAFTER-TENSOR-MISSING",
        "lm_head.weight",
    ),
    "clusters without their tensors": (
        lambda root, text: root.update(use_ordered_embeddings=True),
        "DRAFTER-TENSOR-MISSING",
        "masked_embedding.centroids.weight",
    ),
    "clusters of unequal size": (
        lambda root, text: root.update(use_ordered_embeddings=True, num_centroids=25),
        "CONFIG-CENTROIDS",
        "num_centroids",
    ),
    "more clusters chosen than there are": (
        lambda root, text: root.update(use_ordered_embeddings=True, centroid_intermediate_top_k=17),
        "CONFIG-CENTROIDS",
        "centroid_intermediate_top_k",
    ),
    "a packing that MLX lacks": (
        lambda root, text: root.update(quantization={"bits": 7, "group_size": 32}),
        "CONFIG-QUANTIZATION",
        "quantization",
    ),
    "a packing of another kind": (
        lambda root, text: root.update(quantization_config={"quant_method": "compressed-tensors"}),
        "CONFIG-QUANTIZATION-FOREIGN",
        "quantization_config: the weights are packed by compressed-tensors",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_wrong_config_is_unsafe_and_the_key_is_named(tmp_path: Path, family: str, fault: str) -> None:
    change, rule, key = CONFIG_FAULTS[fault]
    verdict, said = judged(edit(write_drafter(tmp_path / "drafter", family=family), change))
    assert verdict == "unsafe"
    assert said[rule][0] == "error"
    assert key in said[rule][1]


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1.5, True])
@pytest.mark.parametrize(
    "key", ["layer_types", "per_layer_config", "num_kv_shared_layers", "num_key_value_heads", "vocab_size"]
)
def test_no_value_of_a_wrong_type_breaks_the_check(tmp_path: Path, key: str, value: object) -> None:
    folder = write_drafter(tmp_path / "drafter")
    edit(folder, lambda root, text: text.update({key: value}))
    assert judged(folder)[0] in ("sound", "doubtful", "unsafe")


TENSOR_FAULTS: dict[str, tuple[Change, str, str]] = {
    "a projection missing": (
        removed("layers.2.self_attn.q_proj.weight"),
        "DRAFTER-TENSOR-MISSING",
        "model.layers.2.self_attn.q_proj.weight",
    ),
    "a scalar missing": (
        removed("layers.0.layer_scalar"),
        "DRAFTER-TENSOR-MISSING",
        "model.layers.0.layer_scalar",
    ),
    "keys of its own": (
        copied("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "model.layers.0.self_attn.k_proj.weight",
    ),
    "a fifth layer": (
        copied("model.layers.3.layer_scalar", "model.layers.4.layer_scalar"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "model.layers.4.layer_scalar",
    ),
    "clusters that the config does not know": (
        copied("model.embed_tokens.weight", "masked_embedding.centroids.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
        "masked_embedding.centroids.weight",
    ),
    "the heads of a sliding layer in a full one": (
        copied("model.layers.0.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        "DRAFTER-TENSOR-SHAPE",
        "model.layers.3.self_attn.q_proj.weight",
    ),
    "another target's width": (
        altered("pre_projection.weight", lambda words: words[:, :128]),
        "DRAFTER-TENSOR-SHAPE",
        "pre_projection.weight",
    ),
    "a norm that is not a number": (
        altered("model.norm.weight", lambda words: np.full_like(words, 0x7FC0)),
        "DRAFTER-TENSOR-VALUES",
        "model.norm.weight",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_damaged_file_is_unsafe_and_the_tensor_is_named(tmp_path: Path, family: str, fault: str) -> None:
    change, rule, name = TENSOR_FAULTS[fault]
    folder = write_drafter(tmp_path / "drafter", family=family)
    edit_tensors(folder, change)
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert said[rule][0] == "error"
    assert name in said[rule][1]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda ids: np.roll(ids, 1) * (np.arange(288) > 0), "DRAFTER-TENSOR-VALUES"),
        (lambda ids: ids + 1, "DRAFTER-TENSOR-VALUES"),
        (lambda ids: ids[:-16], "DRAFTER-TENSOR-SHAPE"),
    ],
    ids=["an id twice", "an id past the vocabulary", "too few"],
)
def test_an_order_that_is_none_is_unsafe(tmp_path: Path, change: Any, rule: str) -> None:
    folder = write_drafter(tmp_path / "drafter", ordered=True)
    edit_tensors(folder, altered(ORDERING, change))
    verdict, said = judged(folder)
    assert verdict == "unsafe"
    assert ORDERING in said[rule][1]


def test_an_output_matrix_beside_a_tied_embedding_is_pointed_out(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", tied=False)
    verdict, said = judged(edit(folder, lambda root, text: root.update(tie_word_embeddings=True)))
    assert (verdict, set(said)) == ("doubtful", {"CONFIG-TIED-HEAD"})


def test_a_last_layer_that_transformers_would_change_is_pointed_out(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", types=(FULL, SLIDING))
    verdict, said = judged(folder)
    assert (verdict, set(said)) == ("doubtful", {"CONFIG-LAST-LAYER"})


# --- pairs ---


@pytest.mark.parametrize("model_type", TARGET_CLASSES)
@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"group_size": 32}], ids=str)
def test_the_pair_that_belongs_together_is_compatible(
    tmp_path: Path, model_type: str, options: dict[str, Any]
) -> None:
    target = write_target(tmp_path / "target", model_type=model_type)
    drafter = write_drafter(tmp_path / "drafter", family=f"{model_type}_assistant", **options)
    assert judged(target, drafter) == ("compatible", {})
    report = api.validate(target, drafter)
    assert report["pair"]["block_size"] == 4
    assert report["facts"]["block_size"]["counts_bonus_token"] is True
    assert report["facts"]["drafter"]["borrows"] == ["embedding"]
    # The last two of the target's six layers have no keys of their own.
    shared = {layer["type"]: layer["target_layer"] for layer in report["facts"]["shared_kv"]["layers"]}
    assert shared == {FULL: 3, SLIDING: 2}


def test_a_pair_whose_keys_are_values_is_compatible(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"groups": 4, "global_groups": 1, "keys_are_values": True}
    target, drafter = write_target(tmp_path / "target", **sizes), write_drafter(tmp_path / "drafter", **sizes)
    assert judged(target, drafter) == ("compatible", {})


def test_a_declared_width_is_the_block_size(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    edit(drafter, lambda root, text: root.update(block_size=6))
    assert api.validate(target, drafter)["pair"]["block_size"] == 6


PAIR_FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another hidden width": ({"hidden": 128}, "PAIR-HIDDEN-SIZE", "128"),
    "another vocabulary": ({"vocab": 128}, "PAIR-VOCAB-SIZE", "128"),
    "wider heads in full attention": (
        {"global_width": 64},
        "PAIR-SHARED-KV",
        "head_dim of the full_attention",
    ),
    "narrower heads in sliding attention": (
        {"width": 8},
        "PAIR-SHARED-KV",
        "head_dim of the sliding_attention",
    ),
    "other key heads": ({"groups": 1}, "PAIR-SHARED-KV", "kv_heads of the sliding_attention"),
    "other key heads in full attention": (
        {"keys_are_values": True, "global_groups": 1},
        "PAIR-SHARED-KV",
        "kv_heads of the full_attention",
    ),
    "no full attention": ({"types": (SLIDING,) * 6}, "PAIR-SHARED-KV", "full_attention"),
    "no sliding attention that keeps its keys": (
        {"types": (FULL, FULL, SLIDING, FULL)},
        "PAIR-SHARED-KV",
        "sliding_attention",
    ),
}


@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_another_target_is_refused_and_the_difference_named(tmp_path: Path, fault: str) -> None:
    sizes, rule, named = PAIR_FAULTS[fault]
    target, drafter = write_target(tmp_path / "target", **sizes), write_drafter(tmp_path / "drafter")
    verdict, said = judged(target, drafter)
    assert verdict == "unsafe"
    assert said[rule][0] == "error"
    assert named in said[rule][1]


def test_keys_turned_by_another_rotation_are_refused(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    edit(target, lambda root, text: text["rope_parameters"][SLIDING].update(rope_theta=1e5))
    verdict, said = judged(target, drafter)
    assert verdict == "unsafe"
    assert "the base of the sliding_attention layers" in said["PAIR-ROPE-SHARED"][1]


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter")
    verdict, said = judged(glm4_moe_lite.write_target(tmp_path / "other"), drafter)
    assert verdict == "unsafe"
    assert "glm4_moe_lite" in said["PAIR-FAMILY"][1]


def test_the_two_kinds_of_assistants_are_not_mixed(tmp_path: Path) -> None:
    for model_type, family in (("gemma4", FAMILIES[1]), ("gemma4_unified", FAMILIES[0])):
        target = write_target(tmp_path / f"for {family}", model_type=model_type)
        verdict, said = judged(target, write_drafter(tmp_path / family, family=family))
        assert verdict == "unsafe"
        assert "PAIR-FAMILY" in said


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    document = json.loads((drafter / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["the"], vocabulary["in"] = vocabulary.get("in", 0), vocabulary.get("the", 0)
    write_json(drafter / "tokenizer.json", document)
    verdict, said = judged(target, drafter)
    assert verdict == "unsafe"
    assert "PAIR-TOKENIZER" in said


def test_drafter_and_target_swapped_are_refused(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    verdict, said = judged(drafter, target)
    assert verdict == "unsafe"
    assert "PAIR-TARGET-ROLE" in said


def test_the_fixture_writes_the_keys_of_the_published_config() -> None:
    config = drafter_config()
    assert "block_size" not in config
    assert config["text_config"]["num_kv_shared_layers"] == len(config["text_config"]["layer_types"])
