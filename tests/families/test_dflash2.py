"""DFlash2 drafters: never taken for DFlash, whose backbone they have, and what may be wrong with them."""

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
    nested,
    pair,
    pair_errors,
    top,
    variants,
    width,
    without,
    write_drafter,
    write_target,
)

FAMILY = "dflash2"


@pytest.mark.parametrize("missing", [("architectures",), ("model_type",), ("architectures", "model_type")])
def test_the_tensors_and_dflash_config_are_enough(tmp_path: Path, missing: tuple[str, ...]) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "published", without(*missing))
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)


def test_a_config_that_says_dflash_is_a_contradiction(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "published", top(architectures=["DFlashDraftModel"]))
    assert family_of(drafter) == FAMILY
    assert "which is dflash" in errors(drafter)["DRAFTER-MODEL-TYPE"].message


def test_both_spellings_of_the_selector_are_known(tmp_path: Path) -> None:
    """A parameter in published files, an embedding's weight where mlx-vlm has saved them; not both."""
    name = "candidate_selector.predecessor_codebook"
    assert name in variants(FAMILY)["speculators"]["tensors"]
    assert f"{name}.weight" in variants(FAMILY)["published"]["tensors"]
    drafter = write_drafter(tmp_path, FAMILY, "speculators", tensors=copied(name, f"{name}.weight"))
    assert errors(drafter)["DRAFTER-TENSOR-UNEXPECTED"].where == f"{name}.weight"


@pytest.mark.parametrize(
    ("variant", "change", "rule", "where"),
    [
        ("published", nested(block_size=None), "CONFIG-BLOCK-SIZE", "/"),
        ("published", nested(block_size=1), "CONFIG-BLOCK-SIZE", "/dflash_config/block_size"),
        ("published", top(block_size=4), "CONFIG-CONFLICT", "/block_size"),
        ("published", nested(mask_token_id=200), "CONFIG-MASK-VOCABULARY", "/dflash_config/mask_token_id"),
        ("published", without("mask_token_id"), "CONFIG-MASK-ID", "/"),
        ("published", without("target_layer_ids"), "CONFIG-TAPS", "/"),
        ("published", nested(target_layer_ids=[2, 0, 4]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("published", nested(target_layer_ids=[0, 2, 6]), "DRAFTER-TAPS", "/dflash_config/target_layer_ids"),
        ("published", without("num_target_layers"), "CONFIG-TARGET-LAYERS", "/"),
        ("published", without("conv_kernel_size"), "CONFIG-CONVOLUTION", "/"),
        ("published", nested(conv_group_size=0), "CONFIG-CONVOLUTION", "/dflash_config/conv_group_size"),
        ("published", nested(conv_group_size=24), "CONFIG-CONVOLUTION", "/dflash_config/conv_group_size"),
        ("published", nested(selector_rank=None), "CONFIG-SELECTOR", "/"),
        ("published", nested(selector_top_k=129), "CONFIG-SELECTOR", "/dflash_config/selector_top_k"),
        ("published", nested(causal=True), "CONFIG-CAUSAL", "/dflash_config/causal"),
        ("published", nested(runtime_block_size=9), "CONFIG-RUNTIME-BLOCK-SIZE", "/dflash_config/runtime_block_size"),
        ("published", top(num_attention_heads=3), "CONFIG-HEADS", "/num_key_value_heads"),
        ("speculators", top(conv_kernel_size=0), "CONFIG-CONVOLUTION", "/conv_kernel_size"),
        ("speculators", top(speculators_model_type="dflash"), "DRAFTER-MODEL-TYPE", "/model_type"),
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
        ("published", drop("layers.1.mlp_conv.base_kernel"), "DRAFTER-TENSOR-MISSING", "layers.1.mlp_conv.base_kernel"),
        ("published", drop("candidate_selector.successor_codebook.weight"), "DRAFTER-TENSOR-MISSING",
         "candidate_selector.successor_codebook.weight"),
        ("published", copied("norm.weight", "embed_tokens.weight"), "DRAFTER-TENSOR-UNEXPECTED", "embed_tokens.weight"),
        ("published", narrow("layers.0.attention_conv.base_kernel"), "DRAFTER-TENSOR-SHAPE",
         "layers.0.attention_conv.base_kernel"),
        ("published", narrow("candidate_selector.hidden_projection.weight"), "DRAFTER-TENSOR-SHAPE",
         "candidate_selector.hidden_projection.weight"),
    ],
)  # fmt: skip
def test_a_fault_in_the_tensors_is_named(
    tmp_path: Path, variant: str, change: TensorChange, rule: str, where: str
) -> None:
    found = errors(write_drafter(tmp_path, FAMILY, variant, tensors=change))
    assert rule in found, {name: finding.message for name, finding in found.items()}
    assert found[rule].where == where


@pytest.mark.parametrize(
    ("variant", "change", "rows", "words"),
    [
        ("published", None, 8, "counts the bonus token"),
        ("speculators", None, 8, "counts the bonus token"),
    ],
)  # fmt: skip
def test_how_many_rows_are_verified(
    tmp_path: Path, variant: str, change: ConfigChange | None, rows: int, words: str
) -> None:
    stated, said = width(write_drafter(tmp_path, FAMILY, variant, change))
    assert stated == rows
    assert words in said


@pytest.mark.parametrize("variant", ["published", "speculators"])
def test_the_right_pair_passes(tmp_path: Path, variant: str) -> None:
    target = write_target(tmp_path / "target")
    verdict = pair(target, write_drafter(tmp_path / "drafter", FAMILY, variant))
    assert verdict.name == "compatible"
    assert (verdict.pair or {})["drafter_family"] == FAMILY


@pytest.mark.parametrize(
    ("sizes", "variant", "change", "rule", "found"),
    [
        ({"hidden": 32}, "published", None, "PAIR-HIDDEN-SIZE", 64),
        ({"layers": 7}, "published", None, "PAIR-TARGET-LAYERS", 7),
        ({"layers": 4}, "speculators", None, "PAIR-TAPS", [0, 2, 4]),
        ({"vocab": 512}, "published", None, "PAIR-VOCAB-SIZE", 128),
        ({"vocab": 112}, "published", None, "PAIR-MASK", 120),
        ({"model_type": "lfm2"}, "published", None, "PAIR-FAMILY", "lfm2"),
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
    keys = ["dflash_config", "block_size", "conv_group_size", "selector_rank", "architectures"]
    for number, key in enumerate(keys):
        for place, value in enumerate((None, [], {}, "x", -1, 1.5, True, [None], {"a": []})):
            drafter = write_drafter(tmp_path / f"{number}-{place}", FAMILY, "published", top(**{key: value}))
            json.dumps([finding.as_dict() for finding in drafter_findings(drafter)])
