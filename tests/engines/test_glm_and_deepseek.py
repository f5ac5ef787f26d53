"""GLM-5, GLM-5.3-Flash and DeepSeek V4 drafters in mlx-vlm: strictly loaded, and drafting what its own split drafts.

mlx-vlm's split of the published FP8 is no measure: GLM-5's does not load, GLM-5.3-Flash's is rounded a second time. It
splits a twin instead, which holds in float32 the values that the FP8 stands for.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fixtures import deepseek_v4, glm5_next, glm_moe_dsa
from fixtures.split_heads import copied, edit_config, edit_tensors, removed, split

FAMILIES: dict[str, Any] = {"GLM-5": glm_moe_dsa, "GLM-5.3-Flash": glm5_next, "DeepSeek V4": deepseek_v4}
MODES = {
    "affine 4": {"q_bits": 4, "q_group_size": 32},
    "affine 8": {"q_bits": 8, "q_group_size": 32},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
    "mixed": {"q_mode": "mxfp8", "q_overrides": ("*.switch_mlp.*=mxfp4", "e*_proj=none")},
}
# Rows and columns that mlx-vlm's reading of DeepSeek V4's FP8 can take: multiples of 128.
WHOLE_BLOCKS = {"hidden": 256, "head_dim": 128, "q_lora": 128, "o_lora": 128, "moe": 128}


def assert_same(found: dict[str, Any]) -> None:
    assert found["only_expected"] == found["only_found"] == []
    assert found["parameters_differing"] == {}
    assert found["finite"]
    assert found["largest_difference"] == 0, found
    assert found["largest_logit"] > 0.5


@pytest.mark.parametrize("kept", ["BF16", "F32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_drafts_what_the_engine_s_own_split_drafts(
    tmp_path: Path, engine: ModuleType, family: str, kept: str
) -> None:
    raw = FAMILIES[family].write_checkpoint(tmp_path / "raw", kept=kept)
    assert_same(engine.compare(raw, split(raw, tmp_path / "drafter")))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoded_fp8_head_drafts_what_its_values_draft(
    tmp_path: Path, engine: ModuleType, family: str
) -> None:
    twin = FAMILIES[family].write_checkpoint(tmp_path / "twin", kept="decoded")
    raw = FAMILIES[family].write_checkpoint(tmp_path / "raw", kept="fp8")
    exact = split(raw, tmp_path / "exact", dtype="float32")
    assert_same(engine.compare(twin, exact))
    rounded = engine.difference(engine.load(exact), engine.load(split(raw, tmp_path / "rounded")))
    # bfloat16 has more digits than FP8 and FP4, but not than their products with scales that are no power of two.
    assert (
        rounded["largest_difference"] == 0 if family == "DeepSeek V4" else rounded["largest_difference"] < 0.1
    )


def test_the_engine_s_own_bytes_of_a_published_v4_head_stand_for_the_same_values(
    tmp_path: Path, engine: ModuleType
) -> None:
    """mlx-vlm reads FP8 with power-of-two scales as MXFP8 and FP4 as MXFP4, byte for byte; so can ours be written."""
    raw = deepseek_v4.write_checkpoint(tmp_path / "raw", **WHOLE_BLOCKS)
    theirs = engine.split(raw, tmp_path / "theirs")
    ours = split(raw, tmp_path / "ours", q_mode="mxfp8", q_overrides=("*.switch_mlp.*=mxfp4",))
    assert_same(engine.difference(engine.dense(theirs), engine.dense(ours)))
    assert engine.difference(engine.load(theirs), engine.load(ours))["largest_difference"] == 0


def test_a_config_in_an_older_form_is_completed(tmp_path: Path, engine: ModuleType) -> None:
    """mlx-vlm reads the rotary base of GLM-5 from rope_parameters alone, and has no default for other keys."""
    raw = glm_moe_dsa.write_checkpoint(tmp_path / "raw", kept="BF16")
    expected = engine.split(raw, tmp_path / "theirs")

    def older(config: dict[str, Any]) -> None:
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        del config["moe_layer_freq"]

    edit_config(raw, older)
    drafter = split(raw, tmp_path / "drafter")
    assert_same(engine.difference(engine.load(expected), engine.load(drafter)))
    edit_config(drafter, lambda config: config.pop("rope_parameters"))
    with pytest.raises(engine.NotLoaded, match="rope_parameters"):
        engine.load(drafter)


def test_dspark_keys_in_the_source_do_not_mislead_the_engine(tmp_path: Path, engine: ModuleType) -> None:
    raw = deepseek_v4.write_checkpoint(tmp_path / "raw", kept="BF16")
    expected = engine.split(raw, tmp_path / "theirs")
    edit_config(raw, lambda config: config.update(dspark_target_layer_ids=[0, 1]))
    assert_same(engine.difference(engine.load(expected), engine.load(split(raw, tmp_path / "drafter"))))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_drafter_loads_and_drafts_what_its_expanded_weights_draft(
    tmp_path: Path, engine: ModuleType, family: str, mode: str
) -> None:
    raw = FAMILIES[family].write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter", **MODES[mode])
    found = engine.difference(engine.dense(drafter), engine.load(drafter))
    assert found["finite"]
    assert found["largest_difference"] < 1e-4, found
    assert found["largest_logit"] > 0.5
    packed = {name.removesuffix(".scales") for name in found["only_found"] if name.endswith(".scales")}
    config = json.loads((drafter / "config.json").read_text())["quantization"]
    assert {name for name in config if isinstance(config[name], dict)} <= packed
    assert sum("switch_mlp" in name for name in packed) == 3


@pytest.mark.parametrize("fault", ["a norm missing", "a tensor too many"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_is_held_to_every_tensor(
    tmp_path: Path, engine: ModuleType, family: str, fault: str
) -> None:
    drafter = split(FAMILIES[family].write_checkpoint(tmp_path / "raw", kept="BF16"), tmp_path / "drafter")
    prefix = "mtp." if family == "GLM-5" else ""
    change = (
        removed("enorm.weight")
        if "missing" in fault
        else copied(f"{prefix}enorm.weight", f"{prefix}onorm.weight")
    )
    edit_tensors(drafter, change)
    with pytest.raises(engine.NotLoaded):
        engine.load(drafter)
