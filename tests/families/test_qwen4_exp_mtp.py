"""Qwen3.8-Flash-Next: every form of the head, its drafter computed independently, and its faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.convert import Request, plan_split
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.qwen4_exp import head_tensors, recipe, source_tensors, write_checkpoint, write_mlx_checkpoint
from fixtures.qwen_parts import fp8_values
from fixtures.split_heads import (
    Change,
    altered,
    assert_holds,
    copied,
    edit_config,
    edit_tensors,
    read_words,
    removed,
    shift_norms,
    split,
    verdict,
)
from fixtures.weights import Array, bf16_bits, on_bf16_grid

LAYER = "mtp.layers.0."
EXPERTS = "layers.0.mlp.experts."
STACK = "layers.0.mlp.switch_mlp."
BLOCKS = {"hidden": 192, "moe": 192, "shared": 192}
VARIANTS: dict[str, dict[str, Any]] = {
    "fused experts": {},
    "float32": {"dtype": "F32"},
    "separate experts": {"experts_form": "separate"},
    "four streams": {"streams": 4},
    "below model.mtp": {"prefix": "model.mtp."},
    "below language_model.mtp": {"prefix": "language_model.mtp."},
    "three shards": {"files": "shards"},
    "side file, not in the index": {"files": "side"},
    "FP8, several blocks": {**BLOCKS, "fp8": True},
}


def drafter_of(head: Mapping[str, Array]) -> dict[str, Array]:
    """The drafter of a head's values: the same, with the experts in three stacks."""
    made = {name: value for name, value in head.items() if not name.startswith(EXPERTS)}
    if fused := [name for name in head if name.endswith("gate_up_proj")]:
        halves = np.split(head[fused[0]], 2, axis=1)
        made[f"{STACK}gate_proj.weight"], made[f"{STACK}up_proj.weight"] = halves
        made[f"{STACK}down_proj.weight"] = head[f"{EXPERTS}down_proj"]
        return made
    for part in ("gate_proj", "up_proj", "down_proj"):
        names = [f"{EXPERTS}{expert}.{part}.weight" for expert in range(recipe().geometry.experts)]
        made[f"{STACK}{part}.weight"] = np.stack([head[name] for name in names])
    return made


def expected(**options: Any) -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint made with these options."""
    made = recipe(**options)
    _, head = source_tensors(made)
    values = {name.removeprefix(made.prefix): value for name, value in fp8_values(head).items()}
    return {name: (value, made.dtype) for name, value in drafter_of(values).items()}


def config_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_what_an_independent_computation_says(tmp_path: Path, variant: str) -> None:
    options = VARIANTS[variant]
    drafter = split(write_checkpoint(tmp_path / "raw", **options), tmp_path / "drafter")
    assert_holds(drafter, expected(**options))
    assert verdict(drafter) == ("sound", set())


def test_the_head_has_31_tensors_and_its_drafter_one_more(tmp_path: Path) -> None:
    assert len(head_tensors(recipe().geometry)) == 31
    assert len(read_words(split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter"))) == 32


def test_norms_stay_as_they_are_for_the_drafter_adds_the_one(tmp_path: Path) -> None:
    raw = split(write_checkpoint(tmp_path / "raw"), tmp_path / "one")
    converted = split(write_mlx_checkpoint(tmp_path / "mlx"), tmp_path / "two")
    assert (raw / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_one_that_a_converter_put_into_the_norms_is_taken_out(tmp_path: Path, dtype: str) -> None:
    """Conversions made before a certain release hold gains: with them the engine would add the 1 twice."""
    drafter = split(write_mlx_checkpoint(tmp_path / "mlx", gains=True, dtype=dtype), tmp_path / "drafter")
    norms = {name: value for name, (value, _) in head_tensors(recipe().geometry).items() if value.ndim == 1}
    assert len(norms) == 9
    found = read_words(drafter)
    for name, value in norms.items():
        # What adding the 1 rounded away is gone; nothing more is lost in taking it out.
        gain = value + np.float32(1)
        wanted = (on_bf16_grid(gain) if dtype == "BF16" else gain) - np.float32(1)
        words = bf16_bits(wanted) if dtype == "BF16" else wanted.astype("<f4").view("<u4")
        assert np.array_equal(found[name][0], words), name
    checkpoint = open_checkpoint(tmp_path / "mlx")
    plan = plan_split(checkpoint, find_head(checkpoint), Request(tmp_path / "other"))
    assert "all 9 norms are stored shifted" in next(
        f.message for f in plan.findings if f.rule == "SPLIT-NORMS"
    )


def test_a_head_that_was_put_back_is_split_into_the_same_bytes(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    api.attach(write_checkpoint(tmp_path / "target", head=False), drafter, tmp_path / "attached")
    again = split(tmp_path / "attached", tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (drafter / name).read_bytes() == (again / name).read_bytes()


def test_the_config_of_the_drafter(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    text = config_of(raw)["text_config"]
    assert config_of(split(raw, tmp_path / "drafter")) == {
        "model_type": "qwen4_exp_mtp",
        "block_size": 2,
        "tie_word_embeddings": False,
        "text_config": {
            **text,
            "mtp_num_hidden_layers": 1,
            "rope_theta": 10_000_000.0,
        },
    }


def test_what_is_not_established_is_said(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "raw"))
    plan = plan_split(checkpoint, find_head(checkpoint), Request(tmp_path / "drafter"))
    assert [finding.rule for finding in plan.findings] == ["SPLIT-FAMILY-EXPERIMENTAL"]
    assert "acceptance is not measured" in plan.findings[0].message


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("affine", {"q_bits": 8, "q_group_size": 32}),
        ("mxfp4", {"q_mode": "mxfp4"}),
        ("nvfp4", {"q_mode": "nvfp4"}),
        ("mxfp8", {"q_mode": "mxfp8"}),
    ],
)
def test_what_steers_streams_and_experts_is_not_quantized(
    tmp_path: Path, mode: str, options: dict[str, Any]
) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter", **options)
    stored = read_words(drafter)
    matrices = {name for name, (words, dtype) in stored.items() if words.ndim > 1 and name.endswith("weight")}
    assert {name for name in matrices if stored[name][1] != "U32"} == {
        "layers.0.attn_hyper_connection.block_inject_weight.weight",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.shared_expert_gate.weight",
        "layers.0.mlp_hyper_connection.block_inject_weight.weight",
    }
    assert config_of(drafter)["quantization"]["mode"] == mode
    assert verdict(drafter) == ("sound", set())


def test_a_head_that_mlx_packed_passes_through_word_for_word(tmp_path: Path) -> None:
    mlx = write_mlx_checkpoint(tmp_path / "mlx", group_size=64)
    drafter = split(mlx, tmp_path / "drafter")
    source = {n.removeprefix("mtp."): t for n, t in read_words(mlx).items() if n.startswith("mtp.")}
    written = read_words(drafter)
    assert written.keys() == source.keys()
    for name, (words, dtype) in source.items():
        assert written[name][1] == dtype
        assert np.array_equal(written[name][0], words), name
    assert config_of(drafter)["quantization"] == {"bits": 4, "group_size": 64, "mode": "affine"}
    assert verdict(drafter) == ("sound", set())


MIXER = "mtp.hyper_connection_mixer."
INDEXER = LAYER + "self_attn.indexer."
FAULTS: dict[str, tuple[dict[str, Any], Change, str]] = {
    "no fusion of the hidden state": ({}, removed("mtp.fc_hidden.weight"), "fc_hidden"),
    "a mixer missing": ({}, removed(MIXER + "input_mix_weight_up.weight"), "input_mix_weight_up"),
    "no mixer norm": ({}, removed(MIXER + "hc_norm.weight"), r"hyper_connection_mixer\.hc_norm"),
    "no indexer": ({}, removed(INDEXER + "index_qk_proj.weight"), "index_qk_proj"),
    "an indexer norm missing": ({}, removed(INDEXER + "k_layernorm.weight"), "k_layernorm"),
    "an injection missing": (
        {},
        removed(LAYER + "mlp_hyper_connection.block_inject_weight.weight"),
        r"mlp_hyper_connection\.block_inject",
    ),
    "the last expert missing": (
        {"experts_form": "separate"},
        removed(*(f"experts.3.{part}_proj.weight" for part in ("gate", "up", "down"))),
        r"experts\.3\.",
    ),
    "half of the fused experts missing": ({}, removed(LAYER + "mlp.experts.down_proj"), "down_proj"),
    "a norm of one stream": (
        {},
        altered("mtp.pre_fc_norm_hidden.weight", lambda words: words[:64]),
        "pre_fc_norm_hidden",
    ),
    "an injection into itself": (
        {},
        copied(
            LAYER + "attn_hyper_connection.block_inject_weight.weight", MIXER + "block_inject_weight.weight"
        ),
        "block_inject_weight",
    ),
    "a last norm": ({}, copied("mtp.pre_fc_norm_embedding.weight", "mtp.norm.weight"), r"mtp\.norm"),
    "NaN": (
        {},
        altered(MIXER + "input_mix_weight_down.weight", lambda words: np.full_like(words, 0x7FC0)),
        "input_mix_weight_down",
    ),
    "FP8 without scales": (
        {"fp8": True},
        removed(LAYER + "mlp.experts.0.up_proj.weight_scale_inv"),
        r"experts\.0\.up_proj",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    options, change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw", **options)
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_second_layer_is_refused_for_the_drafter_holds_one(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    names = [name for name in read_words(raw) if name.startswith(LAYER)]
    edit_tensors(
        raw, lambda tensors: tensors.update({n.replace("layers.0", "layers.1"): tensors[n] for n in names})
    )
    with pytest.raises(Refused, match="2 head layers"):
        split(raw, tmp_path / "drafter")


MUTATIONS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (removed("fc_embedding.weight"), "DRAFTER-TENSOR-MISSING"),
    "a tensor under its raw name": (copied("fc_hidden.weight", "mtp.fc.weight"), "DRAFTER-TENSOR-UNEXPECTED"),
    "another shape": (
        altered("layers.0.self_attn.indexer.index_qk_proj.weight", lambda words: words[:64]),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (
        altered("hyper_connection_mixer.hc_norm.weight", lambda words: np.full_like(words, 0x7FC0)),
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


def test_validate_finds_norms_that_hold_the_one_that_the_engine_adds(tmp_path: Path) -> None:
    mlx = write_mlx_checkpoint(tmp_path / "mlx", gains=True)
    kept = split(mlx, tmp_path / "kept")
    edit_tensors(kept, shift_norms(1))
    assert verdict(kept) == ("unsafe", {"DRAFTER-NORMS", "MANIFEST-TENSORS"})
    assert verdict(split(mlx, tmp_path / "taken out")) == ("sound", set())


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model_type", "qwen3_5_text", "CONFIG-TEXT-MODEL-TYPE"),
        ("hc_lowrank", None, "CONFIG-DIMENSION"),
        ("num_experts", 0, "CONFIG-DIMENSION"),
        ("hc_count", 1, "CONFIG-STREAMS"),
        ("indexer_kv_heads", 2, "CONFIG-INDEXER"),
        ("mtp_num_hidden_layers", 2, "CONFIG-HEAD-DEPTH"),
        ("rope_parameters", {}, "CONFIG-ROPE"),
        ("rms_norm_eps", None, "CONFIG-NUMBER"),
        ("hidden_act", "gelu", "CONFIG-ACTIVATION"),
        ("mtp_use_dedicated_embeddings", True, "CONFIG-EMBEDDINGS"),
    ],
)
def test_validate_names_what_is_wrong_with_the_config(
    tmp_path: Path, key: str, value: Any, rule: str
) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_config(drafter, lambda text: text.update({key: value}))
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules
