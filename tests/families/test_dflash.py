"""DFlash drafters: both shapes of z-lab's config and that of speculators, what may be wrong, and their targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.families.drafters import find_drafter
from fixtures import qwen3_5
from fixtures.qwen_parts import to_affine
from fixtures.tapped import (
    ConfigChange,
    TensorChange,
    Tensors,
    copied,
    drafter_findings,
    drop,
    errors,
    family_of,
    layer,
    narrow,
    nested,
    pair,
    pair_errors,
    shifted,
    top,
    variants,
    width,
    without,
    write_drafter,
    write_target,
    zeroed,
)
from fixtures.tokenizers import write_tokenizer

FAMILY = "dflash"


@pytest.mark.parametrize("missing", [("architectures",), ("model_type",), ("architectures", "model_type")])
def test_the_tensors_and_dflash_config_are_enough(tmp_path: Path, missing: tuple[str, ...]) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "old_shape", without(*missing))
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)


def test_a_config_that_speaks_of_an_ordinary_model_is_an_error(tmp_path: Path) -> None:
    drafter = write_drafter(
        tmp_path,
        FAMILY,
        "old_shape",
        lambda c: (c.pop("dflash_config"), c.update(architectures=["Qwen3ForCausalLM"])),
    )
    assert family_of(drafter) == FAMILY
    assert errors(drafter)["DRAFTER-MODEL-TYPE"].found == "qwen3"


def test_the_class_of_another_family_is_a_contradiction(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "old_shape", top(architectures=["DFlash2DraftModel"]))
    assert family_of(drafter) == FAMILY
    assert "dflash2" in errors(drafter)["DRAFTER-MODEL-TYPE"].message


def test_an_ordinary_qwen3_model_is_no_drafter(tmp_path: Path) -> None:
    assert family_of(write_target(tmp_path, "qwen3")) is None


def test_a_name_means_nothing(tmp_path: Path) -> None:
    assert family_of(write_drafter(tmp_path / "qwen3-assistant-mtp", FAMILY, "old_shape")) == FAMILY


@pytest.mark.parametrize("other", ["dflash2", "lfm2_dspark", "deepspec_dspark", "eagle3", "xpress"])
def test_a_drafter_of_a_related_family_is_not_taken_for_dflash(tmp_path: Path, other: str) -> None:
    for variant in variants(other):
        assert family_of(write_drafter(tmp_path / variant, other, variant)) == other, variant


def test_a_config_alone_says_what_is_missing(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "old_shape", tensors=lambda tensors: tensors.clear())
    assert errors(drafter)["DRAFTER-TENSORS"].expected == ["fc.weight", "hidden_norm.weight"]


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("old_shape", nested(block_size=8)),
        ("old_shape", nested(num_target_layers=6)),
        ("old_shape", nested(block_size=None)),
        ("old_shape", top(rope_parameters={"rope_type": "default", "rope_theta": 1e7})),
        ("old_shape", top(is_causal=False, dflash_config={
            "mask_token_id": 120, "target_layer_ids": [0, 2, 4], "causal": False})),
        ("new_shape", top(block_size=16, mask_token_id=120)),
        ("new_shape", without("num_target_layers")),
        ("new_shape", nested(swa_window_size=32)),
        ("speculators", top(hidden_size=64, target_layer_ids=[0, 2, 4])),
    ],
)  # fmt: skip
def test_spellings_that_agree_are_fine(tmp_path: Path, variant: str, change: ConfigChange) -> None:
    assert not errors(write_drafter(tmp_path, FAMILY, variant, change))


@pytest.mark.parametrize(
    ("variant", "change", "where", "expected", "found"),
    [
        ("old_shape", nested(block_size=4), "/block_size", 4, 8),
        ("old_shape", nested(num_target_layers=7), "/num_target_layers", 7, 6),
        ("old_shape", top(rope_parameters={"rope_theta": 1e4}), "/rope_theta", 1e4, 1e7),
        ("old_shape", lambda c: (c.update(is_causal=True), c["dflash_config"].update(causal=False)),
         "/is_causal", False, True),
        ("new_shape", top(mask_token_id=4), "/mask_token_id", 120, 4),
        ("new_shape", top(target_layer_ids=[1, 3]), "/target_layer_ids", [1, 4], [1, 3]),
        ("new_shape", nested(swa_window_size=16), "/sliding_window", 16, 32),
        ("speculators", top(target_layer_ids=[1, 3, 5]), "/target_layer_ids", [0, 2, 4], [1, 3, 5]),
        ("speculators", top(hidden_size=32), "/hidden_size", 64, 32),
    ],
)  # fmt: skip
def test_spellings_that_disagree_are_an_error(
    tmp_path: Path, variant: str, change: ConfigChange, where: str, expected: Any, found: Any
) -> None:
    conflict = errors(write_drafter(tmp_path, FAMILY, variant, change))["CONFIG-CONFLICT"]
    assert (conflict.where, conflict.expected, conflict.found) == (f"config.json#{where}", expected, found)


@pytest.mark.parametrize(
    ("variant", "change", "rule", "where"),
    [
        ("old_shape", without("mask_token_id"), "CONFIG-MASK-ID", "/"),
        ("old_shape", nested(mask_token_id=None), "CONFIG-MASK-ID", "/"),
        ("old_shape", nested(mask_token_id=128), "CONFIG-MASK-VOCABULARY", "/dflash_config/mask_token_id"),
        ("old_shape", nested(mask_token_id=-1), "CONFIG-MASK-ID", "/dflash_config/mask_token_id"),
        ("old_shape", top(eos_token_id=[120, 127]), "CONFIG-MASK-SPECIAL", "/dflash_config/mask_token_id"),
        ("old_shape", top(pad_token_id=120), "CONFIG-MASK-SPECIAL", "/dflash_config/mask_token_id"),
        ("old_shape", without("target_layer_ids"), "CONFIG-TAPS", "/"),
        ("old_shape", nested(target_layer_ids=[]), "CONFIG-TAPS", "/dflash_config/target_layer_ids"),
        ("old_shape", nested(target_layer_ids=[-1, 2, 4]), "CONFIG-TAPS", "/dflash_config/target_layer_ids/0"),
        ("old_shape", nested(target_layer_ids="all"), "CONFIG-TAPS", "/dflash_config/target_layer_ids"),
        ("old_shape", nested(target_layer_ids=[0, 4, 2]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("old_shape", nested(target_layer_ids=[2, 2, 4]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("old_shape", nested(target_layer_ids=[0, 2, 6]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("old_shape", top(block_size=1), "CONFIG-BLOCK-SIZE", "/block_size"),
        ("new_shape", nested(block_size=64), "CONFIG-BLOCK-SIZE", "/dflash_config/block_size"),
        ("old_shape", top(num_key_value_heads=3), "CONFIG-HEADS", "/num_key_value_heads"),
        ("old_shape", without("head_dim"), "CONFIG-DIMENSION", "/"),
        ("old_shape", top(hidden_size="64"), "CONFIG-DIMENSION", "/hidden_size"),
        ("old_shape", top(hidden_act="gelu"), "CONFIG-ACTIVATION", "/hidden_act"),
        ("old_shape", top(rms_norm_eps=0), "CONFIG-NUMBER", "/rms_norm_eps"),
        ("old_shape", top(num_target_layers=0), "CONFIG-TARGET-LAYERS", "/num_target_layers"),
        ("old_shape", nested(projector_type="domino"), "CONFIG-PROJECTOR", "/dflash_config/projector_type"),
        ("old_shape", top(target_hidden_size=96), "CONFIG-TARGET-HIDDEN", "/target_hidden_size"),
        ("new_shape", top(layer_types=["full_attention"]), "CONFIG-LAYER-TYPES", "/layer_types"),
        ("new_shape", top(layer_types=["linear_attention"] * 3), "CONFIG-LAYER-TYPES", "/layer_types"),
        ("new_shape", without("sliding_window"), "CONFIG-SLIDING-WINDOW", "/"),
        ("speculators", top(aux_hidden_state_layer_ids=None), "CONFIG-TAPS", "/"),
        ("speculators", top(aux_hidden_state_layer_ids=[0, 3, 5]), "CONFIG-TAPS", "/aux_hidden_state_layer_ids/0"),
        ("speculators", top(mask_token_id=None), "CONFIG-MASK-ID", "/mask_token_id"),
        ("speculators", layer(vocab_size=120), "CONFIG-MASK-VOCABULARY", "/mask_token_id"),
        ("speculators", top(transformer_layer_config=None), "CONFIG-DIMENSION", "/"),
        ("speculators", lambda c: c["speculators_config"].update(default_proposal_method="sample"),
         "CONFIG-PROPOSAL-METHOD", "/speculators_config/default_proposal_method"),
        ("speculators", top(block_size=4), "CONFIG-SPECULATIVE-TOKENS",
         "/speculators_config/proposal_methods/0/speculative_tokens"),
    ],
)  # fmt: skip
def test_a_fault_in_the_config_is_named(
    tmp_path: Path, variant: str, change: ConfigChange, rule: str, where: str
) -> None:
    found = errors(write_drafter(tmp_path, FAMILY, variant, change))
    assert rule in found, {name: finding.message for name, finding in found.items()}
    assert found[rule].where == f"config.json#{where}"


@pytest.mark.parametrize(
    ("change", "rule", "where"),
    [
        (drop("norm.weight"), "DRAFTER-TENSOR-MISSING", "norm.weight"),
        (drop("layers.1.self_attn.k_norm.weight"), "DRAFTER-TENSOR-MISSING", "layers.1.self_attn.k_norm.weight"),
        (copied("norm.weight", "lm_head.weight"), "DRAFTER-TENSOR-UNEXPECTED", "lm_head.weight"),
        (copied("norm.weight", "layers.2.input_layernorm.weight"), "DRAFTER-TENSOR-UNEXPECTED",
         "layers.2.input_layernorm.weight"),
        (narrow("fc.weight"), "DRAFTER-TENSOR-SHAPE", "fc.weight"),
        (zeroed("norm.weight"), "DRAFTER-TENSOR-VALUES", "norm.weight"),
    ],
)  # fmt: skip
def test_a_fault_in_the_tensors_is_named(tmp_path: Path, change: TensorChange, rule: str, where: str) -> None:
    found = errors(write_drafter(tmp_path, FAMILY, "old_shape", tensors=change))
    assert found[rule].where == where


def test_fc_is_as_wide_as_all_taps(tmp_path: Path) -> None:
    change = nested(target_layer_ids=[0, 2])
    found = errors(write_drafter(tmp_path, FAMILY, "old_shape", change))["DRAFTER-TENSOR-SHAPE"]
    assert (found.where, found.expected, found.found) == ("fc.weight", [64, 128], [64, 192])


def test_a_reduced_vocabulary_needs_its_table_and_head(tmp_path: Path) -> None:
    for name in ("d2t", "lm_head.weight"):
        drafter = write_drafter(tmp_path / name, FAMILY, "speculators_reduced", tensors=drop(name))
        assert errors(drafter)["DRAFTER-TENSOR-MISSING"].where == name


def test_a_table_that_leads_out_of_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "speculators_reduced", tensors=shifted(-1, 97))
    found = errors(drafter)["DRAFTER-VOCABULARY-MAP"]
    assert (found.where, found.expected, found.found) == ("d2t", 127, 31 + 97)


def test_a_table_with_one_target_id_twice_is_an_error(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "speculators_reduced", tensors=shifted(1, -1))
    assert errors(drafter)["DRAFTER-VOCABULARY-MAP"].found == 31


PACKED = top(quantization={"bits": 4, "group_size": 32}, quantization_config={"bits": 4, "group_size": 32})


@pytest.mark.parametrize("dtype", ["BOOL", "U8"])
def test_both_tables_of_a_vocabulary_name_the_same_ids(tmp_path: Path, dtype: str) -> None:
    def change(*other: int) -> TensorChange:
        def write(tensors: Tensors) -> None:
            flags = tensors["t2d"][0].astype("|u1")
            flags[list(other)] ^= 1
            tensors["t2d"] = flags, dtype

        return write

    assert not errors(write_drafter(tmp_path / "whole", FAMILY, "speculators_reduced", tensors=change()))
    folder = write_drafter(tmp_path / "other", FAMILY, "speculators_reduced", tensors=change(3, 4, 5))
    (found,) = errors(folder).values()
    assert (found.rule, found.where) == ("DRAFTER-VOCABULARY-MAP", "t2d")
    assert (found.expected, found.found) == (32, 33)
    assert "3 of the target's ids, such as 3, 4, 5" in found.message


def packed(tensors: Tensors) -> None:
    tensors.update(to_affine(tensors, 32))


def test_a_quantized_drafter_is_sound_and_may_be_paired(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", FAMILY, "old_shape", PACKED, packed)
    assert not errors(drafter)
    assert pair(write_target(tmp_path / "target"), drafter).name == "compatible"


def test_packing_and_config_have_to_agree(tmp_path: Path) -> None:
    eight = top(quantization={"bits": 8, "group_size": 32}, quantization_config={"bits": 8, "group_size": 32})
    silent = write_drafter(tmp_path / "silent", FAMILY, "old_shape", None, packed)
    wrong = write_drafter(tmp_path / "wrong", FAMILY, "old_shape", eight, packed)
    bare = write_drafter(
        tmp_path / "bare",
        FAMILY,
        "old_shape",
        PACKED,
        lambda t: (packed(t), t.pop("fc.scales"), t.pop("fc.biases")),
    )
    assert all(map(errors, (silent, wrong, bare)))


def test_sliding_layers_without_a_word_on_causality_are_noted(tmp_path: Path) -> None:
    silent = drafter_findings(write_drafter(tmp_path / "silent", FAMILY, "new_shape"))
    assert [f.level for f in silent if f.rule == "CONFIG-CAUSAL-UNSTATED"] == ["note"]
    said = drafter_findings(write_drafter(tmp_path / "said", FAMILY, "new_shape", nested(causal=False)))
    assert not [f for f in said if f.rule == "CONFIG-CAUSAL-UNSTATED"]


def test_a_base_of_the_rotation_that_is_not_stated_is_a_warning(tmp_path: Path) -> None:
    found = drafter_findings(write_drafter(tmp_path, FAMILY, "old_shape", without("rope_theta")))
    assert [f.level for f in found if f.rule == "CONFIG-ROPE-UNSTATED"] == ["warning"]


@pytest.mark.parametrize(
    ("settings", "is_stated"),
    [
        ({"rope_type": "default"}, False),
        ({"full_attention": {"rope_type": "default"}}, False),
        ({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}, True),
    ],
    ids=["flat", "by type", "by type, stated"],
)
def test_rope_parameters_have_to_state_the_base(
    tmp_path: Path, settings: dict[str, object], is_stated: bool
) -> None:
    found = drafter_findings(write_drafter(tmp_path, FAMILY, "z_lab", top(rope_parameters=settings)))
    assert any(f.rule == "CONFIG-ROPE-UNSTATED" for f in found) != is_stated


@pytest.mark.parametrize("base", [-1, "x", float("nan")])
def test_the_rope_of_a_speculators_layer_is_judged_where_it_stands(tmp_path: Path, base: object) -> None:
    change = layer(rope_parameters={"rope_type": "default", "rope_theta": base})
    found = errors(write_drafter(tmp_path, FAMILY, "speculators", change))
    assert found["CONFIG-PARSE"].where == "config.json#/transformer_layer_config/rope_parameters/rope_theta"


@pytest.mark.parametrize(
    ("variant", "change", "rows", "words"),
    [
        ("old_shape", None, 8, "counts the bonus token"),
        ("new_shape", None, 16, "counts the bonus token"),
        ("speculators", None, 8, "counts the bonus token"),
        ("speculators", top(sample_from_anchor=True), 9, "counts proposals"),
    ],
)
def test_block_size_counts_the_bonus_token(
    tmp_path: Path, variant: str, change: ConfigChange | None, rows: int, words: str
) -> None:
    stated, said = width(write_drafter(tmp_path, FAMILY, variant, change))
    assert stated == rows
    assert words in said


def test_without_a_block_size_sixteen_rows_are_verified(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter", FAMILY, "old_shape", without("block_size"))
    verdict = pair(target, drafter)
    assert (verdict.pair or {})["block_size"] == 16
    assert "default" in (verdict.pair or {})["block_size_from"]


def test_speculators_ids_are_one_higher(tmp_path: Path) -> None:
    match = find_drafter(open_checkpoint(write_drafter(tmp_path, FAMILY, "speculators")))
    assert match is not None
    assert match.config.get("target_layer_ids") == [0, 2, 4]
    assert match.config.where("target_layer_ids") == "/aux_hidden_state_layer_ids"


@pytest.mark.parametrize("variant", ["old_shape", "new_shape", "z_lab", "speculators", "speculators_reduced"])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_the_right_pair_passes(tmp_path: Path, variant: str, model_type: str) -> None:
    target = write_target(tmp_path / "target", model_type)
    assert pair(target, write_drafter(tmp_path / "drafter", FAMILY, variant)).name == "compatible"


def test_a_qwen3_5_target_passes(tmp_path: Path) -> None:
    target = qwen3_5.write_checkpoint(tmp_path / "target", vocab=128, layers=6, head=False)
    assert pair(target, write_drafter(tmp_path / "drafter", FAMILY, "old_shape")).name == "compatible"


@pytest.mark.parametrize(
    ("sizes", "variant", "change", "rule", "expected", "found"),
    [
        ({"hidden": 32}, "old_shape", None, "PAIR-HIDDEN-SIZE", 32, 64),
        ({"layers": 7}, "old_shape", None, "PAIR-TARGET-LAYERS", 6, 7),
        ({"layers": 4}, "old_shape", without("num_target_layers"), "PAIR-TAPS", 4, [0, 2, 4]),
        ({"layers": 4}, "speculators", None, "PAIR-TAPS", 4, [0, 2, 4]),
        ({"vocab": 512}, "old_shape", None, "PAIR-VOCAB-SIZE", 512, 128),
        ({"vocab": 112, "tokens": 112}, "old_shape", None, "PAIR-MASK", 112, 120),
        ({"model_type": "inkling"}, "old_shape", None, "PAIR-FAMILY", None, "inkling"),
        ({"model_type": "lfm2"}, "old_shape", None, "PAIR-FAMILY", None, "lfm2"),
        ({"model_type": "laguna"}, "speculators", None, "PAIR-FAMILY", None, "laguna"),
    ],
)
def test_a_wrong_pair_is_refused_by_field(
    tmp_path: Path,
    sizes: dict[str, Any],
    variant: str,
    change: ConfigChange | None,
    rule: str,
    expected: Any,
    found: Any,
) -> None:
    target = write_target(tmp_path / "target", **sizes)
    drafter = write_drafter(tmp_path / "drafter", FAMILY, variant, change)
    refused = pair_errors(target, drafter)
    assert rule in refused, list(refused)
    assert refused[rule].found == found
    if expected is not None:
        assert refused[rule].expected == expected


def test_the_tap_that_is_too_deep_is_named(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", layers=4)
    drafter = write_drafter(tmp_path / "drafter", FAMILY, "old_shape", without("num_target_layers"))
    assert "id 4" in pair_errors(target, drafter)["PAIR-TAPS"].message


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", FAMILY, "old_shape")
    write_tokenizer(drafter, 100)
    assert "PAIR-TOKENIZER" in pair_errors(write_target(tmp_path / "target"), drafter)


def test_garbage_never_raises(tmp_path: Path) -> None:
    config = variants(FAMILY)["old_shape"]["config"]
    for number, key in enumerate([*config, "layer_types", "rope_parameters", "transformer_layer_config"]):
        for place, value in enumerate((None, [], {}, "x", -1, 1.5, True, [None], {"a": []})):
            drafter = write_drafter(tmp_path / f"{number}-{place}", FAMILY, "old_shape", top(**{key: value}))
            json.dumps([finding.as_dict() for finding in drafter_findings(drafter)])
