"""MTP heads in speculators format: the target's layer under other names, its config inside another."""

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
    expected_shapes,
    family_of,
    layer,
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

FAMILY = "speculators_mtp"


@pytest.mark.parametrize("missing", ["architectures", "speculators_model_type"])
def test_one_mark_in_the_config_is_enough(tmp_path: Path, missing: str) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "qwen3", without(missing))
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)


def test_another_type_is_a_contradiction(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "qwen3", top(speculators_model_type="eagle3"))
    assert family_of(drafter) == FAMILY
    assert "which is eagle3" in errors(drafter)["DRAFTER-MODEL-TYPE"].message


@pytest.mark.parametrize(
    ("variant", "change", "rule", "where"),
    [
        ("qwen3", top(num_nextn_predict_layers=2), "CONFIG-HEAD-DEPTH", "/num_nextn_predict_layers"),
        ("qwen3", layer(model_type="gemma4_text"), "CONFIG-BACKBONE", "/transformer_layer_config/model_type"),
        ("qwen3", without("hidden_size"), "CONFIG-DIMENSION", "/"),
        ("qwen3", layer(head_dim=-16), "CONFIG-DIMENSION", "/transformer_layer_config/head_dim"),
        ("qwen3", layer(num_key_value_heads=3), "CONFIG-HEADS", "/transformer_layer_config/num_key_value_heads"),
        ("qwen3", layer(rms_norm_eps=2), "CONFIG-NUMBER", "/transformer_layer_config/rms_norm_eps"),
        ("qwen3", layer(hidden_act="gelu"), "CONFIG-ACTIVATION", "/transformer_layer_config/hidden_act"),
        ("qwen3", layer(intermediate_size=None), "CONFIG-EXPERTS-PER-TOKEN", "/"),
        ("qwen3", layer(rope_theta=5e5), "CONFIG-CONFLICT", "/transformer_layer_config/rope_theta"),
        ("qwen3", top(hidden_size=32), "CONFIG-CONFLICT", "/hidden_size"),
        ("qwen3", lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=99),
         "CONFIG-SPECULATIVE-TOKENS", "/speculators_config/proposal_methods/0/speculative_tokens"),
        ("qwen3_5_moe", layer(num_experts_per_tok=None), "CONFIG-EXPERTS-PER-TOKEN", "/"),
        ("qwen3_5_moe", layer(num_experts_per_tok=0), "CONFIG-EXPERTS-PER-TOKEN",
         "/transformer_layer_config/num_experts_per_tok"),
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
        ("qwen3", drop("mtp_layers.0.token_layernorm.weight"), "DRAFTER-TENSOR-MISSING",
         "mtp_layers.0.token_layernorm.weight"),
        ("qwen3", copied("mtp_layers.0.final_layernorm.weight", "mtp_layers.1.final_layernorm.weight"),
         "DRAFTER-TENSOR-UNEXPECTED", "mtp_layers.1.final_layernorm.weight"),
        ("qwen3_5", narrow("mtp_layers.0.input_proj.weight"), "DRAFTER-TENSOR-SHAPE", "mtp_layers.0.input_proj.weight"),
        ("qwen3_5_moe", drop("mtp_layers.0.mlp.experts.down_proj"), "DRAFTER-TENSOR-MISSING",
         "mtp_layers.0.mlp.experts.down_proj"),
        ("qwen3_next", drop("mtp_layers.0.mlp.shared_expert_gate.weight"), "DRAFTER-TENSOR-MISSING",
         "mtp_layers.0.mlp.shared_expert_gate.weight"),
    ],
)  # fmt: skip
def test_a_fault_in_the_tensors_is_named(
    tmp_path: Path, variant: str, change: TensorChange, rule: str, where: str
) -> None:
    found = errors(write_drafter(tmp_path, FAMILY, variant, tensors=change))
    assert rule in found, {name: finding.message for name, finding in found.items()}
    assert found[rule].where == where


def test_a_query_is_twice_as_wide_where_attention_is_gated(tmp_path: Path) -> None:
    rows = {}
    for variant in ("qwen3", "qwen3_5"):
        shapes = expected_shapes(write_drafter(tmp_path / variant, FAMILY, variant))
        rows[variant] = shapes["mtp_layers.0.self_attn.q_proj.weight"][0]
    assert rows["qwen3_5"] == 2 * rows["qwen3"]


def test_a_head_of_the_verifier_that_the_converter_left_is_no_fault(tmp_path: Path) -> None:
    assert "verifier_lm_head.weight" in variants(FAMILY)["qwen3"]["tensors"]
    assert not errors(write_drafter(tmp_path, FAMILY, "qwen3", tensors=drop("verifier_lm_head.weight")))


@pytest.mark.parametrize(
    ("variant", "change", "rows", "words"),
    [
        ("qwen3", None, 4, "speculative_tokens + 1"),
    ],
)  # fmt: skip
def test_how_many_rows_are_verified(
    tmp_path: Path, variant: str, change: ConfigChange | None, rows: int, words: str
) -> None:
    stated, said = width(write_drafter(tmp_path, FAMILY, variant, change))
    assert stated == rows
    assert words in said


@pytest.mark.parametrize(("variant", "layers"), [("qwen3", 2), ("qwen3_5", 2)])
def test_the_right_pair_passes(tmp_path: Path, variant: str, layers: int) -> None:
    target = write_target(tmp_path / "target", variant if variant == "qwen3" else "qwen3_next", layers=layers)
    assert pair(target, write_drafter(tmp_path / "drafter", FAMILY, variant)).name == "compatible"


@pytest.mark.parametrize(
    ("sizes", "variant", "change", "rule", "found"),
    [
        ({"layers": 2, "hidden": 32}, "qwen3", None, "PAIR-HIDDEN-SIZE", 64),
        ({"layers": 2, "vocab": 512}, "qwen3", None, "PAIR-VOCAB-SIZE", 128),
        ({"layers": 2, "model_type": "gemma4"}, "qwen3", None, "PAIR-FAMILY", "gemma4"),
        ({"layers": 2, "model_type": "llama"}, "qwen3", None, "PAIR-FAMILY", "llama"),
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
    keys = ["transformer_layer_config", "speculators_config", "num_nextn_predict_layers", "architectures"]
    for number, key in enumerate(keys):
        for place, value in enumerate((None, [], {}, "x", -1, 1.5, True, [None], {"a": []})):
            drafter = write_drafter(tmp_path / f"{number}-{place}", FAMILY, "qwen3", top(**{key: value}))
            json.dumps([finding.as_dict() for finding in drafter_findings(drafter)])
