"""Nemotron-H: every variant of the head, its drafter computed independently, and its faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.glm4_moe_lite import write_target
from fixtures.nemotron_h import Geometry, checkpoint_tensors, write_checkpoint
from fixtures.split_heads import (
    Change,
    altered,
    assert_holds,
    attach,
    copied,
    edit_config,
    edit_tensors,
    pair_verdict,
    read_words,
    removed,
    split,
    stacked,
    verdict,
)
from fixtures.weights import Array

FIRST, SECOND = "mtp.layers.0.", "mtp.layers.1."
EXPERTS = SECOND + "mixer.experts."
BIAS = "gate.e_score_correction_bias"


def expected(dtype: str = "BF16", **sizes: Any) -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint of these sizes."""
    geometry = replace(Geometry(), **sizes)
    values = checkpoint_tensors(geometry, 0)
    made = {
        name.removeprefix("mtp."): value
        for name, value in values.items()
        if name.startswith("mtp.") and ".experts." not in name
    }
    for output, name in (("fc1", "up_proj"), ("fc2", "down_proj")):
        experts = stacked(values, EXPERTS, f".{name}.weight", geometry.experts)
        made[f"layers.1.mixer.switch_mlp.{output}.weight"] = experts
    return {name: (value, "F32" if name.endswith(BIAS) else dtype) for name, value in made.items()}


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("latent", [0, 32], ids=["no latent", "latent"])
def test_every_tensor_is_what_an_independent_computation_says(
    tmp_path: Path, dtype: str, latent: int
) -> None:
    drafter = split(
        write_checkpoint(tmp_path / "raw", dtype=dtype, latent=latent, shards=2), tmp_path / "drafter"
    )
    assert_holds(drafter, expected(dtype, latent=latent))
    assert verdict(drafter) == ("sound", set())


def test_an_omni_model_keeps_head_and_config_one_level_down(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", omni=True)
    head = api.inspect(raw)["head"]
    assert (head["family"], head["prefix"], head["complete"], head["layers_declared"]) == (
        "nemotron_h_mtp",
        "language_model.mtp.",
        True,
        1,
    )
    drafter = split(raw, tmp_path / "drafter")
    assert_holds(drafter, expected())
    text = json.loads((raw / "config.json").read_text())["llm_config"]
    config = json.loads((drafter / "config.json").read_text())
    assert config["text_config"] == {**text, "mtp_hybrid_override_pattern": "*E"}
    assert pair_verdict(raw, drafter) == ("proven", set())


def test_stacked_experts_are_taken_as_they_are(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")

    def stack(tensors: dict[str, tuple[Array, str]]) -> None:
        for output, name in (("fc1", "up_proj"), ("fc2", "down_proj")):
            parts = [tensors.pop(f"{EXPERTS}{e}.{name}.weight")[0] for e in range(4)]
            tensors[f"{SECOND}mixer.switch_mlp.{output}.weight"] = (np.stack(parts), "BF16")

    edit_tensors(raw, stack)
    assert_holds(split(raw, tmp_path / "drafter"), expected())


def test_scales_of_a_quantized_cache_are_left_behind(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    one = np.ones((), "<f4")
    edit_tensors(
        raw,
        lambda tensors: tensors.update(
            {f"{FIRST}mixer.{part}_proj.{part}_scale": (one, "F32") for part in ("k", "v")}
        ),
    )
    assert_holds(split(raw, tmp_path / "drafter"), expected())


def test_what_stays_in_full_precision(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter", q_bits=4)
    dtypes = {name: dtype for name, (_, dtype) in read_words(drafter).items()}
    packed = {name for name, dtype in dtypes.items() if dtype == "U32"}
    assert packed == {
        "layers.0.eh_proj.weight",
        *(f"layers.0.mixer.{part}_proj.weight" for part in "qkvo"),
        *(f"layers.1.mixer.switch_mlp.{part}.weight" for part in ("fc1", "fc2")),
        *(f"layers.1.mixer.shared_experts.{part}_proj.weight" for part in ("up", "down")),
    }
    assert dtypes["layers.1.mixer.gate.weight"] == "BF16"
    assert dtypes[f"layers.1.mixer.{BIAS}"] == "F32"
    assert verdict(drafter) == ("sound", set())


@pytest.mark.parametrize("stated", [None, "*E"], ids=["block types", "pattern"])
def test_the_config_of_the_drafter(tmp_path: Path, stated: str | None) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    edit_config(
        raw, lambda config: config.update(num_nextn_predict_layers=None, mtp_hybrid_override_pattern=stated)
    )
    config = json.loads((split(raw, tmp_path / "drafter") / "config.json").read_text())
    text = json.loads((raw / "config.json").read_text())
    assert config == {
        "model_type": "nemotron_h_mtp",
        "block_size": 2,
        "tie_word_embeddings": False,
        "text_config": {**text, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    }


def test_two_sub_layers_are_one_declared_layer(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(write_checkpoint(tmp_path / "raw")))
    assert match is not None
    assert (match.layers_declared, match.layers_found, match.findings) == (1, 1, ())


def test_a_target_without_its_head_is_told_so(tmp_path: Path) -> None:
    report = api.validate(write_checkpoint(tmp_path / "target", head=False))
    assert report["verdict"] == "sound"
    assert [finding["rule"] for finding in report["findings"]] == ["HEAD-ABSENT"]


FAULTS: dict[str, tuple[Change, str]] = {
    "fusion missing": (removed(FIRST + "eh_proj.weight"), r"layers\.0\.eh_proj"),
    "an expert missing": (removed(EXPERTS + "2.up_proj.weight"), r"experts\.2\.up_proj"),
    "the last norm missing": (removed(SECOND + "final_layernorm.weight"), "final_layernorm"),
    "an expert too many": (
        copied(EXPERTS + "3.up_proj.weight", EXPERTS + "4.up_proj.weight"),
        r"experts\.4\.up_proj",
    ),
    "a third sub-layer": (copied(FIRST + "norm.weight", "mtp.layers.2.norm.weight"), r"layers\.2\.norm"),
    "experts of another width": (
        altered(EXPERTS + "1.down_proj.weight", lambda words: words[:32]),
        r"experts\.1\.down_proj",
    ),
    "NaN in the router": (
        altered(SECOND + "mixer.gate.weight", lambda words: np.full_like(words, 0x7FC0)),
        r"mixer\.gate\.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw")
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_latent_width_that_the_tensors_do_not_have_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    edit_config(raw, lambda config: config.update(moe_latent_size=32))
    with pytest.raises(Refused, match="fc1_latent_proj"):
        split(raw, tmp_path / "drafter")


MUTATIONS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (removed("layers.0.mixer.o_proj.weight"), "DRAFTER-TENSOR-MISSING"),
    "experts apart again": (
        copied("layers.0.norm.weight", "layers.1.mixer.experts.0.up_proj.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
    ),
    "another shape": (
        altered("layers.1.mixer.switch_mlp.fc1.weight", lambda words: words[:2]),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (
        altered("layers.1.final_layernorm.weight", lambda words: np.full_like(words, 0x7FC0)),
        "DRAFTER-TENSOR-VALUES",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_validate_calls_a_changed_drafter_unsafe(tmp_path: Path, mutation: str) -> None:
    change, rule = MUTATIONS[mutation]
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_tensors(drafter, change)
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model_type", "qwen3_5", "CONFIG-TEXT-MODEL-TYPE"),
        ("head_dim", None, "CONFIG-DIMENSION"),
        ("head_dim", 16, "DRAFTER-TENSOR-SHAPE"),
        ("num_nextn_predict_layers", 2, "CONFIG-HEAD-DEPTH"),
        ("mtp_hybrid_override_pattern", "*-", "CONFIG-PATTERN"),
        ("layer_norm_epsilon", 0, "CONFIG-NUMBER"),
        ("n_group", 0, "CONFIG-ROUTING"),
        ("mlp_hidden_act", "silu", "CONFIG-ACTIVATION"),
        ("attention_bias", True, "CONFIG-BIAS"),
        ("num_experts_per_tok", 0, "CONFIG-EXPERTS-PER-TOKEN"),
        ("num_experts_per_tok", 5, "CONFIG-EXPERTS"),
        ("moe_latent_size", 32, "DRAFTER-TENSOR-MISSING"),
    ],
)
def test_validate_calls_a_changed_config_unsafe(tmp_path: Path, key: str, value: object, rule: str) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_config(drafter, lambda config: config.update({key: value}))
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


def test_the_pair_is_proven_by_its_own_source_and_unsafe_with_another_target(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter")
    assert pair_verdict(raw, drafter) == ("proven", set())
    target = write_checkpoint(tmp_path / "target", head=False)
    assert pair_verdict(target, drafter) == ("compatible", set())
    name, rules = pair_verdict(write_checkpoint(tmp_path / "wider", head=False, hidden=128), drafter)
    assert name == "unsafe"
    assert "PAIR-HIDDEN-SIZE" in rules
    name, rules = pair_verdict(write_target(tmp_path / "stranger"), drafter)
    assert name == "unsafe"
    assert "PAIR-FAMILY" in rules


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("omni", [False, True], ids=["alone", "omni"])
def test_a_head_put_back_splits_into_the_same_bytes(tmp_path: Path, bits: int | None, omni: bool) -> None:
    if bits:
        pytest.importorskip("mlx.core")
    drafter = split(write_checkpoint(tmp_path / "raw", omni=omni), tmp_path / "drafter", q_bits=bits)
    target = write_checkpoint(tmp_path / "target", omni=omni, head=False)
    attached = attach(target, drafter, tmp_path / "attached")
    assert "text_config" not in json.loads((attached / "config.json").read_text())
    again = split(attached, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
