"""EAGLE-3 and P-EAGLE drafters: original and speculators form, taps that are never guessed, and their faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.tapped import (
    Config,
    ConfigChange,
    TensorChange,
    Tensors,
    both,
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
    shifted,
    top,
    variants,
    width,
    without,
    write_drafter,
    write_target,
)

FAMILY = "eagle3"
VARIANTS = pytest.mark.parametrize("variant", variants(FAMILY))


def original(config: Config) -> None:
    """The config of the original files: flat, with the taps in eagle_config."""
    ids, nested = config.pop("eagle_aux_hidden_state_layer_ids"), config.pop("transformer_layer_config")
    for key in ("speculators_model_type", "speculators_version", "speculators_config"):
        config.pop(key, None)
    config.update({key: value for key, value in nested.items() if key != "architectures"})
    config.update(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}


def midlayer(tensors: Tensors) -> None:
    """The names of the original files: one layer, called midlayer, and no embedding."""
    for name in list(tensors):
        if name.startswith("layers.0."):
            tensors[name.replace("layers.0.", "midlayer.")] = tensors[name]
        if name.startswith(("layers.", "embed_tokens.")):
            del tensors[name]


def test_the_original_form_is_known(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "speculators_llama", original, midlayer)
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)
    assert "midlayer.hidden_norm.weight" in expected_shapes(drafter)


@pytest.mark.parametrize("missing", [("architectures",), ("speculators_model_type", "architectures")])
def test_the_tensors_are_enough(tmp_path: Path, missing: tuple[str, ...]) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "speculators_qwen3", without(*missing))
    assert family_of(drafter) == FAMILY
    assert not errors(drafter)


def test_the_class_of_another_family_is_a_contradiction(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, FAMILY, "speculators_qwen3", top(architectures=["DFlashDraftModel"]))
    assert family_of(drafter) == FAMILY
    assert "which is dflash" in errors(drafter)["DRAFTER-MODEL-TYPE"].message


def test_an_ordinary_llama_is_no_drafter(tmp_path: Path) -> None:
    assert family_of(write_target(tmp_path, "llama")) is None


def test_taps_that_are_not_stated_are_not_guessed(tmp_path: Path) -> None:
    drafter = write_drafter(
        tmp_path,
        FAMILY,
        "speculators_llama",
        both(original, without("eagle_aux_hidden_state_layer_ids")),
        midlayer,
    )
    assert "eagle_config" in errors(drafter)["CONFIG-TAPS"].message


@pytest.mark.parametrize(("ids", "agree"), [([2, 3, 5], True), ([2, 3, 4], False)])
def test_taps_in_two_places_have_to_agree(tmp_path: Path, ids: list[int], agree: bool) -> None:
    change = top(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    found = errors(write_drafter(tmp_path, FAMILY, "speculators_qwen3", change))
    assert ("CONFIG-CONFLICT" not in found) == agree
    if not agree:
        assert found["CONFIG-CONFLICT"].where == "config.json#/eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("variant", "change", "rule", "where"),
    [
        ("speculators_qwen3", top(eagle_aux_hidden_state_layer_ids=None), "CONFIG-TAPS",
         "/eagle_aux_hidden_state_layer_ids"),
        ("speculators_qwen3", top(eagle_aux_hidden_state_layer_ids=[]), "CONFIG-TAPS",
         "/eagle_aux_hidden_state_layer_ids"),
        ("speculators_qwen3", top(eagle_aux_hidden_state_layer_ids=[5, 3, 2]), "DRAFTER-TAPS",
         "/eagle_aux_hidden_state_layer_ids"),
        ("speculators_qwen3", top(num_target_layers=4), "DRAFTER-TAPS", "/eagle_aux_hidden_state_layer_ids"),
        ("speculators_qwen3", layer(vocab_size=0), "CONFIG-DIMENSION", "/transformer_layer_config/vocab_size"),
        ("speculators_qwen3", layer(num_key_value_heads=3), "CONFIG-HEADS",
         "/transformer_layer_config/num_key_value_heads"),
        ("speculators_qwen3", layer(hidden_act="gelu"), "CONFIG-ACTIVATION", "/transformer_layer_config/hidden_act"),
        ("speculators_qwen3", layer(rope_theta=5e5), "CONFIG-CONFLICT", "/transformer_layer_config/rope_theta"),
        ("speculators_qwen3", top(draft_vocab_size=256), "CONFIG-DRAFT-VOCABULARY", "/draft_vocab_size"),
        ("speculators_qwen3", top(draft_vocab_size="all"), "CONFIG-DRAFT-SIZES", "/draft_vocab_size"),
        ("speculators_qwen3", top(norm_before_fc=True), "CONFIG-FUSION-NORMS", "/"),
        ("speculators_qwen3", top(fc_norm="yes"), "CONFIG-FLAG", "/fc_norm"),
        ("speculators_qwen3", lambda c: c["speculators_config"].update(default_proposal_method="tree"),
         "CONFIG-PROPOSAL-METHOD", "/speculators_config/default_proposal_method"),
        ("speculators_qwen3", lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=0),
         "CONFIG-SPECULATIVE-TOKENS", "/speculators_config/proposal_methods/0/speculative_tokens"),
        ("peagle", top(mask_token_id=None), "CONFIG-MASK-ID", "/mask_token_id"),
        ("speculators_qwen3", top(speculators_model_type="mtp"), "DRAFTER-MODEL-TYPE", "/model_type"),
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
        ("speculators_qwen3", drop("lm_head.weight"), "DRAFTER-TENSOR-MISSING", "lm_head.weight"),
        ("speculators_qwen3", drop("fc_norm.1.weight"), "DRAFTER-TENSOR-MISSING", "fc_norm.1.weight"),
        ("speculators_norm", drop("input_norm.weight"), "DRAFTER-TENSOR-MISSING", "input_norm.weight"),
        ("speculators_llama", copied("norm.weight", "input_norm.weight"), "DRAFTER-TENSOR-UNEXPECTED",
         "input_norm.weight"),
        ("speculators_llama", drop("d2t"), "DRAFTER-TENSOR-MISSING", "d2t"),
        ("speculators_llama", narrow("fc.weight"), "DRAFTER-TENSOR-SHAPE", "fc.weight"),
        ("speculators_llama", narrow("layers.0.self_attn.q_proj.weight"), "DRAFTER-TENSOR-SHAPE",
         "layers.0.self_attn.q_proj.weight"),
        ("speculators_llama", copied("layers.0.hidden_norm.weight", "layers.1.hidden_norm.weight"),
         "DRAFTER-TENSOR-UNEXPECTED", "layers.1.hidden_norm.weight"),
        ("speculators_llama", shifted(31, 128), "DRAFTER-VOCABULARY-MAP", "d2t"),
        ("speculators_llama", shifted(0, -1), "DRAFTER-VOCABULARY-MAP", "d2t"),
        ("speculators_llama", shifted(1, -1), "DRAFTER-VOCABULARY-MAP", "d2t"),
        ("peagle", drop("mask_hidden"), "DRAFTER-TENSOR-MISSING", "mask_hidden"),
        ("speculators_llama", copied("fc.weight", "mask_hidden"), "DRAFTER-TENSOR-UNEXPECTED", "mask_hidden"),
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
        ("speculators_qwen3", None, 4, "speculative_tokens + 1"),
        ("peagle", None, 9, "speculative_tokens + 1"),
    ],
)  # fmt: skip
def test_how_many_rows_are_verified(
    tmp_path: Path, variant: str, change: ConfigChange | None, rows: int, words: str
) -> None:
    stated, said = width(write_drafter(tmp_path, FAMILY, variant, change))
    assert stated == rows
    assert words in said


def test_a_drafter_with_an_embedding_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors["fc.weight"] = (tensors["fc.weight"][0][:, :32].repeat(9, axis=1), "BF16")

    change = top(target_hidden_size=96)
    own = write_drafter(tmp_path / "own", FAMILY, "speculators_llama", change, widen)
    assert not errors(own)
    assert pair(write_target(tmp_path / "target", "llama", hidden=96), own).name == "compatible"

    def borrow(tensors: Tensors) -> None:
        widen(tensors)
        del tensors["embed_tokens.weight"]

    borrowing = write_drafter(tmp_path / "borrowing", FAMILY, "speculators_llama", change, borrow)
    assert errors(borrowing)["CONFIG-TARGET-HIDDEN"].where == "config.json#/target_hidden_size"


def test_a_vocabulary_of_its_own_is_noted(tmp_path: Path) -> None:
    reduced = drafter_findings(write_drafter(tmp_path / "reduced", FAMILY, "speculators_llama"))
    assert [f.level for f in reduced if f.rule == "CONFIG-DRAFT-VOCABULARY-ENGINES"] == ["note"]
    whole = drafter_findings(write_drafter(tmp_path / "whole", FAMILY, "speculators_qwen3"))
    assert not [f for f in whole if f.rule == "CONFIG-DRAFT-VOCABULARY-ENGINES"]


@VARIANTS
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_right_pair_passes(tmp_path: Path, variant: str, model_type: str) -> None:
    target = write_target(tmp_path / "target", model_type)
    verdict = pair(target, write_drafter(tmp_path / "drafter", FAMILY, variant))
    assert verdict.name == "compatible", [f.message for f in verdict.findings if f.level != "note"]


def test_without_a_number_of_proposals_four_rows_are_verified(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "llama")
    drafter = write_drafter(tmp_path / "drafter", FAMILY, "speculators_qwen3", without("speculators_config"))
    assert (pair(target, drafter).pair or {})["block_size"] == 4


@pytest.mark.parametrize(
    ("sizes", "variant", "change", "rule", "found"),
    [
        ({"hidden": 32}, "speculators_qwen3", None, "PAIR-HIDDEN-SIZE", 64),
        ({"layers": 4}, "speculators_qwen3", None, "PAIR-TAPS", [2, 3, 5]),
        ({"layers": 7}, "speculators_qwen3", top(num_target_layers=6), "PAIR-TARGET-LAYERS", 7),
        ({"vocab": 512}, "speculators_qwen3", None, "PAIR-VOCAB-SIZE", 128),
    ],
)  # fmt: skip
def test_a_wrong_pair_is_refused_by_field(
    tmp_path: Path, sizes: dict[str, Any], variant: str, change: ConfigChange | None, rule: str, found: Any
) -> None:
    target = write_target(tmp_path / "target", **{"model_type": "llama"} | sizes)
    refused = pair_errors(target, write_drafter(tmp_path / "drafter", FAMILY, variant, change))
    assert rule in refused, list(refused)
    assert refused[rule].found == found


def test_the_tap_that_is_too_deep_is_named(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "llama", layers=4)
    drafter = write_drafter(tmp_path / "drafter", FAMILY, "speculators_qwen3")
    assert "id 5" in pair_errors(target, drafter)["PAIR-TAPS"].message


def test_garbage_never_raises(tmp_path: Path) -> None:
    keys = ["eagle_config", "eagle_aux_hidden_state_layer_ids", "transformer_layer_config", "fc_norm"]
    for number, key in enumerate(keys):
        for place, value in enumerate((None, [], {}, "x", -1, 1.5, True, [None], {"a": []})):
            drafter = write_drafter(
                tmp_path / f"{number}-{place}", FAMILY, "speculators_llama", top(**{key: value})
            )
            json.dumps([finding.as_dict() for finding in drafter_findings(drafter)])
