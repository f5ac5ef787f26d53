"""Qwen drafters in mlx-vlm: strictly loaded, and drafting what its own split of the same source drafts, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fixtures import qwen3_5, qwen4_exp
from fixtures.qwen_parts import fp8_values, fuse, write_folder
from fixtures.split_heads import copied, edit_tensors, removed, split

MOE = {"model_type": "qwen3_5_moe", "profile": "35B-A3B"}
Write = Callable[..., Path]
SOURCES: dict[str, tuple[Write, dict[str, Any]]] = {
    "dense": (qwen3_5.write_checkpoint, {}),
    "dense, float32": (qwen3_5.write_checkpoint, {"dtype": "F32"}),
    "dense, tied": (qwen3_5.write_checkpoint, {"tied": True}),
    "side file, not in the index": (qwen3_5.write_checkpoint, {"files": "side"}),
    "fused experts": (qwen3_5.write_checkpoint, MOE),
    "separate experts": (qwen3_5.write_checkpoint, {**MOE, "head_experts": "separate"}),
    "Qwen3-Next": (qwen3_5.write_checkpoint, {"model_type": "qwen3_next"}),
    "Flash-Next": (qwen4_exp.write_checkpoint, {}),
    "Flash-Next, four streams, float32": (qwen4_exp.write_checkpoint, {"streams": 4, "dtype": "F32"}),
}
# Sources that mlx-vlm does not split, or rounds twice, and the same weights in a form that it splits.
TWINS: dict[str, tuple[Write, dict[str, Any], Write, dict[str, Any]]] = {
    "below model.mtp": (qwen3_5.write_checkpoint, {"prefix": "model.mtp."}, qwen3_5.write_checkpoint, {}),
    "converted": (qwen3_5.write_mlx_checkpoint, MOE, qwen3_5.write_checkpoint, MOE),
    "Flash-Next, separate experts": (
        qwen4_exp.write_checkpoint,
        {"experts_form": "separate"},
        qwen4_exp.write_checkpoint,
        {},
    ),
    "Flash-Next, converted with gains": (
        qwen4_exp.write_mlx_checkpoint,
        {"gains": True, "dtype": "F32"},
        qwen4_exp.write_checkpoint,
        {"dtype": "F32"},
    ),
}
MODES = {
    "affine 4": {"q_bits": 4, "q_group_size": 64},
    "affine 8": {"q_bits": 8, "q_group_size": 32},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
    "mixed": {"q_bits": 4, "q_group_size": 32, "q_overrides": ("*.mlp.*=mxfp8",)},
}
QUANTIZED: dict[str, tuple[Write, dict[str, Any]]] = {
    "dense": (qwen3_5.write_checkpoint, {}),
    "experts": (qwen3_5.write_checkpoint, MOE),
    "Flash-Next": (qwen4_exp.write_checkpoint, {}),
}


def assert_same(found: dict[str, Any], tolerance: float = 0.0) -> None:
    assert found["only_expected"] == found["only_found"] == []
    assert found["finite"]
    assert found["largest_difference"] <= tolerance, found
    assert found["largest_logit"] > 0.5


@pytest.mark.parametrize("source", SOURCES)
def test_it_drafts_what_the_engine_s_own_split_drafts(
    tmp_path: Path, engine: ModuleType, source: str
) -> None:
    write, options = SOURCES[source]
    raw = write(tmp_path / "raw", **options)
    found = engine.compare(raw, split(raw, tmp_path / "drafter"))
    assert_same(found)
    assert found["parameters_differing"] == {}


@pytest.mark.parametrize("twin", TWINS)
def test_what_the_engine_cannot_split_drafts_the_same_once_split(
    tmp_path: Path, engine: ModuleType, twin: str
) -> None:
    write, options, write_plain, plain_options = TWINS[twin]
    raw = write_plain(tmp_path / "plain", **plain_options)
    drafter = split(write(tmp_path / "raw", **options), tmp_path / "drafter")
    # A 1 added and taken out again rounds the last digits of small numbers, in float32 too.
    assert_same(engine.compare(raw, drafter), 1e-5 if "gains" in twin else 0.0)


@pytest.mark.parametrize("form", ["dense", "experts", "Flash-Next"])
def test_an_fp8_head_drafts_what_its_decoded_values_draft(
    tmp_path: Path, engine: ModuleType, form: str
) -> None:
    """mlx-vlm would round such a head once more; it is given the plain values in bfloat16 instead."""
    options: dict[str, Any] = {"fp8": True, "hidden": 192, "moe": 192, "shared": 192}
    recipes = qwen4_exp if form == "Flash-Next" else qwen3_5
    options |= MOE if form == "experts" else {}
    made = recipes.recipe(**options)
    trunk, head = (
        fuse({name: (value, "BF16") for name, value in fp8_values(tensors).items()})
        for tensors in recipes.source_tensors(made)
    )
    config = recipes.config_document(made.geometry)
    plain = write_folder(tmp_path / "plain", trunk, head, config, vocab=made.geometry.vocab)
    raw = recipes.write_checkpoint(tmp_path / "raw", **options)
    found = engine.compare(plain, split(raw, tmp_path / "drafter"))
    assert_same(found)
    assert found["parameters_differing"] == {}


def test_a_head_of_two_layers_drafts_the_same_where_the_engine_builds_both(
    tmp_path: Path, engine: ModuleType
) -> None:
    """mlx-vlm 0.7.10 builds one layer for any folder it loads, its own included; built by hand, both layers run."""
    raw = qwen3_5.write_checkpoint(tmp_path / "raw", depth=2, declared=2)
    ours, theirs = split(raw, tmp_path / "ours"), engine.split(raw, tmp_path / "theirs")
    for folder in (ours, theirs):
        with pytest.raises(engine.NotLoaded, match=r"layers\.1"):
            engine.load(folder)
    assert_same(engine.difference(engine.dense(theirs), engine.dense(ours)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", QUANTIZED)
def test_a_quantized_drafter_loads_and_drafts_what_its_expanded_weights_draft(
    tmp_path: Path, engine: ModuleType, form: str, mode: str
) -> None:
    write, options = QUANTIZED[form]
    drafter = split(write(tmp_path / "raw", **options), tmp_path / "drafter", **MODES[mode])
    found = engine.difference(engine.dense(drafter), engine.load(drafter))
    assert found["finite"]
    assert found["largest_difference"] < 1e-4, found
    assert any(name.endswith(".scales") for name in found["only_found"])


@pytest.mark.parametrize("mode", ["affine 4", "mxfp8"])
def test_quantized_words_are_those_of_the_engine_s_own_split(
    tmp_path: Path, engine: ModuleType, mode: str
) -> None:
    """A dense head has no router, and everything else is quantized by both."""
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    theirs = engine.load(engine.split(raw, tmp_path / "theirs", **MODES[mode]))
    ours = engine.load(split(raw, tmp_path / "ours", **MODES[mode]))
    found = engine.difference(theirs, ours)
    assert_same(found)
    assert found["parameters_differing"] == {}


@pytest.mark.parametrize("fault", ["a norm missing", "a tensor too many"])
def test_the_engine_is_held_to_every_tensor(tmp_path: Path, engine: ModuleType, fault: str) -> None:
    """mlx-vlm would run without a module that has no weights, after a warning; the harness does not let it."""
    drafter = split(qwen3_5.write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_tensors(
        drafter,
        removed("pre_fc_norm_hidden.weight") if "missing" in fault else copied("fc.weight", "fx.weight"),
    )
    (drafter / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(engine.NotLoaded):
        engine.load(drafter)
