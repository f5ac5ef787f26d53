"""DSpark drafters without an embedding: LFM2's, SpecForge's and those of speculators, and their faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.tapped import (
    ConfigChange,
    TensorChange,
    both,
    copied,
    drafter_findings,
    drop,
    errors,
    family_of,
    narrow,
    nested,
    pair,
    pair_errors,
    shifted,
    top,
    width,
    without,
    write_drafter,
    write_target,
)

FAMILY = "lfm2_dspark"


@pytest.mark.parametrize("missing", [("architectures",), ("model_type",), ("architectures", "model_type")])
def test_the_tensors_and_dflash_config_are_enough(tmp_path: Path, missing: tuple[str, ...]) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "published", without(*missing))
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)


@pytest.mark.parametrize("name", ["Lfm2DSparkDraftModel", "DSparkDraftModel", "Qwen3DSparkModel"])
def test_a_class_name_that_several_projects_use_decides_nothing(tmp_path: Path, name: str) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "published", top(architectures=[name]))
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)


@pytest.mark.parametrize(
    ("name", "other"), [("DFlashDraftModel", "dflash"), ("Gemma4DSparkModel", "deepspec_dspark")]
)
def test_the_class_of_another_family_is_a_contradiction(tmp_path: Path, name: str, other: str) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "published", top(architectures=[name]))
    assert family_of(drafter) == FAMILY
    assert f"which is {other}" in errors(drafter)["DRAFTER-MODEL-TYPE"].message


@pytest.mark.parametrize(
    "change",
    [
        nested(markov_rank=24, markov_head_type=None),
        both(without("num_target_layers"), top(num_target_layers=6)),
        top(dspark_config={"markov_rank": 24, "enable_confidence_head": True}),
        top(block_size=9),
    ],
)
def test_spellings_that_agree_are_fine(tmp_path: Path, change: ConfigChange) -> None:
    assert not errors(write_drafter(tmp_path, FAMILY, "published", change))


def test_keys_of_dspark_config_count(tmp_path: Path) -> None:
    change = both(without("markov_rank"), top(dspark_config={"markov_rank": 24}))
    assert not errors(write_drafter(tmp_path, FAMILY, "published", change))


@pytest.mark.parametrize(
    ("variant", "change", "rule", "where"),
    [
        ("published", nested(target_layer_ids=[]), "CONFIG-TAPS", "/dflash_config/target_layer_ids"),
        ("published", without("target_layer_ids"), "CONFIG-TAPS", "/"),
        ("published", nested(target_layer_ids=[-1, 2, 4]), "CONFIG-TAPS", "/dflash_config/target_layer_ids/0"),
        ("published", nested(target_layer_ids=[0, 4, 2]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("published", nested(target_layer_ids=[0, 2, 2]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("published", nested(target_layer_ids=[0, 2, 6]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("published", without("num_target_layers"), "CONFIG-TARGET-LAYERS", "/"),
        ("published", without("mask_token_id"), "CONFIG-MASK-ID", "/"),
        ("published", nested(mask_token_id=-1), "CONFIG-MASK-ID", "/dflash_config/mask_token_id"),
        ("published", nested(mask_token_id=128), "CONFIG-MASK-VOCABULARY", "/dflash_config/mask_token_id"),
        ("published", nested(block_size=None), "CONFIG-BLOCK-SIZE", "/"),
        ("published", nested(block_size=0), "CONFIG-BLOCK-SIZE", "/dflash_config/block_size"),
        ("published", nested(block_size=32), "CONFIG-BLOCK-SIZE", "/dflash_config/block_size"),
        ("published", nested(runtime_block_size=1), "CONFIG-RUNTIME-BLOCK-SIZE", "/dflash_config/runtime_block_size"),
        ("published", nested(runtime_block_size=11), "CONFIG-RUNTIME-BLOCK-SIZE", "/dflash_config/runtime_block_size"),
        ("published", top(markov_rank=0), "CONFIG-MARKOV-RANK", "/markov_rank"),
        ("published", nested(markov_rank=12), "CONFIG-CONFLICT", "/markov_rank"),
        ("published", top(dspark_config={"markov_rank": 12}), "CONFIG-CONFLICT", "/markov_rank"),
        ("published", top(markov_head_type="tree"), "CONFIG-MARKOV-HEAD", "/markov_head_type"),
        ("published", nested(projector_type="domino"), "CONFIG-PROJECTOR", "/dflash_config/projector_type"),
        ("published", top(rope_is_neox_style="no"), "CONFIG-FLAG", "/rope_is_neox_style"),
        ("published", top(num_attention_heads=3), "CONFIG-HEADS", "/num_key_value_heads"),
        ("without_confidence", top(enable_confidence_head=True), "DRAFTER-CONFIDENCE-HEAD", "/enable_confidence_head"),
        ("speculators", top(aux_hidden_state_layer_ids=None), "CONFIG-TAPS", "/"),
        ("speculators", top(block_size=7), "CONFIG-SPECULATIVE-TOKENS",
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
    ("variant", "change", "rule", "where"),
    [
        ("published", drop("markov_head.markov_w2.weight"), "DRAFTER-TENSOR-MISSING", "markov_head.markov_w2.weight"),
        ("published", narrow("markov_head.markov_w1.weight"), "DRAFTER-TENSOR-SHAPE", "markov_head.markov_w1.weight"),
        ("published", narrow("confidence_head.proj.weight"), "DRAFTER-TENSOR-SHAPE", "confidence_head.proj.weight"),
        ("published", narrow("fc.weight"), "DRAFTER-TENSOR-SHAPE", "fc.weight"),
        ("published", copied("norm.weight", "markov_head.gate_proj.bias"), "DRAFTER-TENSOR-UNEXPECTED",
         "markov_head.gate_proj.bias"),
        ("speculators_gated", drop("markov_head.gate_proj.weight"), "DRAFTER-TENSOR-MISSING",
         "markov_head.gate_proj.weight"),
        ("speculators_rnn", drop("markov_head.joint_proj.bias"), "DRAFTER-TENSOR-MISSING",
         "markov_head.joint_proj.bias"),
        ("speculators_gated", shifted(0, -1), "DRAFTER-VOCABULARY-MAP", "d2t"),
    ],
)  # fmt: skip
def test_a_fault_in_the_tensors_is_named(
    tmp_path: Path, variant: str, change: TensorChange, rule: str, where: str
) -> None:
    found = errors(write_drafter(tmp_path, FAMILY, variant, tensors=change))
    assert rule in found, {name: finding.message for name, finding in found.items()}
    assert found[rule].where == where


def test_interleaved_rotation_that_is_not_stated_is_noted(tmp_path: Path) -> None:
    silent = drafter_findings(write_drafter(tmp_path, FAMILY, "published", without("rope_is_neox_style")))
    assert [f.level for f in silent if f.rule == "CONFIG-ROPE-PAIRING"] == ["note"]


@pytest.mark.parametrize(
    ("variant", "change", "rows", "words"),
    [
        ("published", None, 8, "10, cut to 8 by default"),
        ("published", nested(runtime_block_size=6), 6, "10, cut to runtime_block_size, 6"),
        ("published", nested(runtime_block_size=10), 10, "counts proposals"),
        ("published", nested(block_size=3), 4, "counts proposals"),
        ("published", top(dspark_bonus_anchor=True), 8, "9, cut to 8"),
        ("published", nested(block_size=31, runtime_block_size=32), 32, "counts proposals"),
        ("speculators", top(sample_from_anchor=False, block_size=7), 7, "counts the bonus token"),
    ],
)  # fmt: skip
def test_how_many_rows_are_verified(
    tmp_path: Path, variant: str, change: ConfigChange | None, rows: int, words: str
) -> None:
    stated, said = width(write_drafter(tmp_path, FAMILY, variant, change))
    assert stated == rows
    assert words in said


@pytest.mark.parametrize("variant", ["published", "without_confidence", "speculators", "speculators_rnn"])
@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe", "qwen3"])
def test_the_right_pair_passes(tmp_path: Path, variant: str, model_type: str) -> None:
    target = write_target(tmp_path / "target", model_type)
    assert pair(target, write_drafter(tmp_path / "drafter", FAMILY, variant)).name == "compatible"


@pytest.mark.parametrize(
    ("sizes", "variant", "change", "rule", "found"),
    [
        ({"hidden": 32}, "published", None, "PAIR-HIDDEN-SIZE", 64),
        ({"layers": 5}, "published", None, "PAIR-TARGET-LAYERS", 5),
        ({"layers": 8}, "published", None, "PAIR-TARGET-LAYERS", 8),
        ({"layers": 4}, "speculators", None, "PAIR-TAPS", [0, 2, 4]),
        ({"vocab": 512}, "published", None, "PAIR-VOCAB-SIZE", 128),
        ({"vocab": 112}, "published", None, "PAIR-MASK", 120),
        ({"model_type": "gemma4"}, "published", None, "PAIR-FAMILY", "gemma4"),
        ({"model_type": "muse_glimmer"}, "published", None, "PAIR-FAMILY", "muse_glimmer"),
    ],
)  # fmt: skip
def test_a_wrong_pair_is_refused_by_field(
    tmp_path: Path, sizes: dict[str, Any], variant: str, change: ConfigChange | None, rule: str, found: Any
) -> None:
    target = write_target(tmp_path / "target", **{"model_type": "lfm2"} | sizes)
    refused = pair_errors(target, write_drafter(tmp_path / "drafter", FAMILY, variant, change))
    assert rule in refused, list(refused)
    assert refused[rule].found == found


def test_garbage_never_raises(tmp_path: Path) -> None:
    keys = ["dflash_config", "markov_rank", "markov_head_type", "block_size", "runtime_block_size"]
    for number, key in enumerate(keys):
        for place, value in enumerate((None, [], {}, "x", -1, 1.5, True, [None], {"a": []})):
            drafter = write_drafter(tmp_path / f"{number}-{place}", FAMILY, "published", top(**{key: value}))
            json.dumps([finding.as_dict() for finding in drafter_findings(drafter)])
