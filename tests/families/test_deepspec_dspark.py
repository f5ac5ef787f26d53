"""DeepSpec's DSpark drafters and what it calls dflash: recognised by their own embedding, and their faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.tapped import (
    ConfigChange,
    TensorChange,
    copied,
    drafter_findings,
    drop,
    errors,
    family_of,
    narrow,
    pair,
    pair_errors,
    top,
    variants,
    width,
    without,
    write_drafter,
    write_target,
)

FAMILY = "deepspec_dspark"
VARIANTS = pytest.mark.parametrize("variant", variants(FAMILY))


@pytest.mark.parametrize("missing", [("architectures",), ("model_type",), ("architectures", "model_type")])
@VARIANTS
def test_the_tensors_and_its_keys_are_enough(tmp_path: Path, variant: str, missing: tuple[str, ...]) -> None:
    if "gemma4" in variant and "model_type" in missing:
        missing = ("architectures",)
    drafter = write_drafter(tmp_path, FAMILY, variant, without(*missing))
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)


def test_what_it_calls_dflash_is_not_that_of_z_lab(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "qwen3_dflash")
    assert variants(FAMILY)["qwen3_dflash"]["config"]["markov_rank"] == 0
    assert family_of(drafter) == FAMILY


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DFlash2DraftModel"])
def test_the_class_of_another_family_is_a_contradiction(tmp_path: Path, name: str) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "qwen3_dflash", top(architectures=[name]))
    assert family_of(drafter) == FAMILY
    assert name in errors(drafter)["DRAFTER-MODEL-TYPE"].message


@pytest.mark.parametrize(
    ("variant", "change", "rule", "where"),
    [
        ("qwen3", top(target_layer_ids=[]), "CONFIG-TAPS", "/target_layer_ids"),
        ("qwen3", without("target_layer_ids"), "CONFIG-TAPS", "/"),
        ("qwen3", top(target_layer_ids=[-2, 2, 4]), "CONFIG-TAPS", "/target_layer_ids/0"),
        ("qwen3", top(target_layer_ids=[2, -1, 4]), "DRAFTER-TAPS", "/target_layer_ids"),
        ("qwen3", top(target_layer_ids=[0, 2, 6]), "DRAFTER-TAPS", "/target_layer_ids"),
        ("qwen3", without("num_target_layers"), "CONFIG-TARGET-LAYERS", "/"),
        ("qwen3", without("mask_token_id"), "CONFIG-MASK-ID", "/"),
        ("qwen3", top(mask_token_id=128), "CONFIG-MASK-VOCABULARY", "/mask_token_id"),
        ("qwen3", top(pad_token_id=120), "CONFIG-MASK-SPECIAL", "/mask_token_id"),
        ("qwen3", without("block_size"), "CONFIG-BLOCK-SIZE", "/"),
        ("qwen3", top(block_size=40), "CONFIG-BLOCK-SIZE", "/block_size"),
        ("qwen3", without("markov_rank"), "CONFIG-MARKOV-RANK", "/"),
        ("qwen3", top(markov_head_type="tree"), "CONFIG-MARKOV-HEAD", "/markov_head_type"),
        ("qwen3", top(tie_word_embeddings=True), "CONFIG-TIED", "/tie_word_embeddings"),
        ("qwen3", top(layer_types=["sliding_attention", "full_attention"]), "CONFIG-LAYER-TYPES", "/layer_types"),
        ("qwen3", top(rope_theta=5e5), "CONFIG-CONFLICT", "/rope_theta"),
        ("qwen3_dflash", top(enable_confidence_head=True, confidence_head_with_markov=True), "CONFIG-CONFIDENCE-HEAD",
         "/confidence_head_with_markov"),
        ("qwen3_dflash", top(enable_confidence_head=True, confidence_head_with_markov=False), "DRAFTER-CONFIDENCE-HEAD",
         "/enable_confidence_head"),
        ("gemma4_mlx_vlm", without("global_head_dim"), "CONFIG-GLOBAL-HEADS", "/"),
        ("gemma4_mlx_vlm", top(num_global_key_value_heads=None), "CONFIG-GLOBAL-HEADS", "/num_global_key_value_heads"),
        ("gemma4_mlx_vlm", top(hidden_activation="silu"), "CONFIG-ACTIVATION", "/hidden_activation"),
    ],
)  # fmt: skip
def test_a_fault_in_the_config_is_named(
    tmp_path: Path, variant: str, change: ConfigChange, rule: str, where: str
) -> None:
    found = errors(write_drafter(tmp_path, FAMILY, variant, change))
    assert rule in found, {name: finding.message for name, finding in found.items()}
    assert found[rule].where == f"config.json#{where}"


@pytest.mark.parametrize(
    ("variant", "change", "rule", "where"),
    [
        ("qwen3", drop("lm_head.weight"), "DRAFTER-TENSOR-MISSING", "lm_head.weight"),
        ("qwen3_dflash", drop("lm_head.weight"), "DRAFTER-TENSOR-MISSING", "lm_head.weight"),
        ("qwen3", narrow("embed_tokens.weight"), "DRAFTER-TENSOR-SHAPE", "embed_tokens.weight"),
        ("qwen3", drop("markov_head.markov_w2.weight"), "DRAFTER-TENSOR-MISSING", "markov_head.markov_w2.weight"),
        ("qwen3_dflash", copied("lm_head.weight", "markov_head.markov_w1.weight"), "DRAFTER-TENSOR-UNEXPECTED",
         "markov_head.markov_w1.weight"),
        ("qwen3_rnn", narrow("markov_head.joint_proj.weight"), "DRAFTER-TENSOR-SHAPE", "markov_head.joint_proj.weight"),
        ("gemma4_mlx_vlm", drop("layers.1.layer_scalar"), "DRAFTER-TENSOR-MISSING", "layers.1.layer_scalar"),
        ("gemma4_mlx_vlm", copied("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"),
         "DRAFTER-TENSOR-UNEXPECTED", "layers.0.self_attn.v_proj.weight"),
        ("qwen3", copied("norm.weight", "layers.0.pre_feedforward_layernorm.weight"), "DRAFTER-TENSOR-UNEXPECTED",
         "layers.0.pre_feedforward_layernorm.weight"),
    ],
)  # fmt: skip
def test_a_fault_in_the_tensors_is_named(
    tmp_path: Path, variant: str, change: TensorChange, rule: str, where: str
) -> None:
    found = errors(write_drafter(tmp_path, FAMILY, variant, tensors=change))
    assert rule in found, {name: finding.message for name, finding in found.items()}
    assert found[rule].where == where


def test_the_embeddings_output_may_be_tapped(tmp_path: Path) -> None:
    assert variants(FAMILY)["qwen3_gated"]["config"]["target_layer_ids"] == [-1, 2]
    target = write_target(tmp_path / "target")
    assert pair(target, write_drafter(tmp_path / "drafter", FAMILY, "qwen3_gated")).name == "compatible"


@pytest.mark.parametrize(
    ("variant", "change", "rows", "words"),
    [
        ("qwen3", None, 8, "counts proposals"),
        ("qwen3", top(block_size=16), 8, "17, cut to 8 by default"),
        ("qwen3", top(block_size=16, runtime_block_size=12), 12, "17, cut to runtime_block_size, 12"),
        ("qwen3_dflash", top(block_size=4), 5, "counts proposals"),
    ],
)  # fmt: skip
def test_how_many_rows_are_verified(
    tmp_path: Path, variant: str, change: ConfigChange | None, rows: int, words: str
) -> None:
    stated, said = width(write_drafter(tmp_path, FAMILY, variant, change))
    assert stated == rows
    assert words in said


@pytest.mark.parametrize(
    ("variant", "model_type"),
    [
        ("qwen3", "qwen3"),
        ("qwen3_dflash", "qwen3"),
        ("qwen3_rnn", "qwen3"),
        ("gemma4_mlx_vlm", "gemma4"),
        ("gemma4_own_values", "gemma4"),
    ],
)
def test_the_right_pair_passes(tmp_path: Path, variant: str, model_type: str) -> None:
    target = write_target(tmp_path / "target", model_type)
    verdict = pair(target, write_drafter(tmp_path / "drafter", FAMILY, variant))
    assert verdict.name == "compatible"
    assert (verdict.facts or {})["borrowed"]["needed"] == []


@pytest.mark.parametrize(
    ("sizes", "variant", "change", "rule", "found"),
    [
        ({"hidden": 32}, "qwen3", None, "PAIR-HIDDEN-SIZE", 64),
        ({"layers": 7}, "qwen3", None, "PAIR-TARGET-LAYERS", 7),
        ({"layers": 4}, "qwen3_dflash", None, "PAIR-TAPS", [0, 2, 4]),
        ({"vocab": 512}, "qwen3", None, "PAIR-VOCAB-SIZE", 128),
        ({"vocab": 112}, "qwen3", None, "PAIR-MASK", 120),
        ({"model_type": "lfm2"}, "qwen3", None, "PAIR-FAMILY", "lfm2"),
    ],
)  # fmt: skip
def test_a_wrong_pair_is_refused_by_field(
    tmp_path: Path, sizes: dict[str, Any], variant: str, change: ConfigChange | None, rule: str, found: Any
) -> None:
    target = write_target(tmp_path / "target", **{"model_type": "qwen3"} | sizes)
    refused = pair_errors(target, write_drafter(tmp_path / "drafter", FAMILY, variant, change))
    assert rule in refused, list(refused)
    assert refused[rule].found == found


def test_garbage_never_raises(tmp_path: Path) -> None:
    keys = ["target_layer_ids", "markov_rank", "markov_head_type", "attention_k_eq_v", "model_type"]
    for number, key in enumerate(keys):
        for place, value in enumerate((None, [], {}, "x", -1, 1.5, True, [None], {"a": []})):
            drafter = write_drafter(
                tmp_path / f"{number}-{place}", FAMILY, "gemma4_mlx_vlm", top(**{key: value})
            )
            json.dumps([finding.as_dict() for finding in drafter_findings(drafter)])
