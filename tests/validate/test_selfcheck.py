"""What a drafter's own folder shows without a manifest to compare it with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.schemas import check, load_schema
from fixtures import glm4_moe, qwen3_5, qwen4_exp
from fixtures.folders import Folders
from fixtures.split_heads import Words, altered, edit_tensors, split
from fixtures.weights import write_safetensors

NUMPY = {"BF16": "<u2", "F16": "<u2", "F32": "<f4", "U32": "<u4", "U8": "u1", "I32": "<i4"}
Stored = dict[str, tuple[np.ndarray, str]]


def stored(checkpoint: Checkpoint) -> Stored:
    """Every tensor as its integers, so that writing it again changes nothing."""
    return {
        name: (np.frombuffer(checkpoint.read(t), NUMPY[t.dtype]).reshape(t.shape), t.dtype)
        for name, t in checkpoint.tensors.items()
    }


def rewrite(folders: Folders, change: Any) -> dict[str, str]:
    """Levels by rule id of the 4-bit drafter after a change to its tensors, without manifest and index."""
    folder = folders.drafter_4bit
    tensors = stored(open_checkpoint(folder))
    change(tensors)
    (folder / MANIFEST).unlink()
    (folder / "model.safetensors.index.json").unlink()
    # write_safetensors rounds floats; integers stored under a float dtype go through as they are.
    raw = {
        name: (values, dtype if dtype not in ("BF16", "F16") else "U16")
        for name, (values, dtype) in tensors.items()
    }
    write_safetensors(folder / "model.safetensors", raw)
    restore_dtypes(folder / "model.safetensors", {name: dtype for name, (_, dtype) in tensors.items()})
    report = api.validate(folder)
    assert check(report, load_schema("validate")) == []
    return {finding["rule"]: finding["level"] for finding in report["findings"]}


def restore_dtypes(path: Path, dtypes: dict[str, str]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, dtype in dtypes.items():
        header[name]["dtype"] = dtype
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_nothing_is_said_of_an_unchanged_drafter(folders: Folders) -> None:
    assert rewrite(folders, lambda tensors: None) == {}


def set_values(name: str, bits: int) -> Any:
    return lambda tensors: tensors.update({name: (np.full_like(tensors[name][0], bits), tensors[name][1])})


def relabel(name: str, values: Any, dtype: str) -> Any:
    return lambda tensors: tensors.update({name: (values(tensors[name][0]), dtype)})


@pytest.mark.parametrize(
    ("change", "rule", "level"),
    [
        (set_values("model.enorm.weight", 0x7FC0), "DRAFTER-TENSOR-VALUES", "error"),
        (set_values("model.enorm.weight", 0), "DRAFTER-TENSOR-VALUES", "error"),
        (relabel("lm_head.scales", lambda v: v.astype("u1"), "U8"), "DRAFTER-TENSOR-PACKED", "error"),
        (relabel("lm_head.scales", lambda v: v.astype("<i4"), "I32"), "DRAFTER-TENSOR-PACKED", "error"),
        (lambda tensors: tensors.pop("lm_head.biases"), "DRAFTER-TENSOR-PACKED", "error"),
        (lambda tensors: tensors.pop("lm_head.scales"), "DRAFTER-TENSOR-PACKED", "error"),
        (
            relabel(
                "model.mtp_block.mlp.gate.e_score_correction_bias",
                lambda v: v.view("<u2")[1::2].copy(),
                "BF16",
            ),
            "DRAFTER-TENSOR-ROUNDED",
            "warning",
        ),
        (
            lambda tensors: tensors.update({"model.enorm.biases": (np.zeros(64, "<u2"), "BF16")}),
            "DRAFTER-TENSOR-UNEXPECTED",
            "error",
        ),
    ],
    ids=[
        "NaN norm",
        "zero norm",
        "U8 scales",
        "I32 scales",
        "no biases",
        "no scales",
        "rounded bias",
        "orphan",
    ],
)
def test_a_fault_in_the_tensors_is_found(folders: Folders, change: Any, rule: str, level: str) -> None:
    assert rewrite(folders, change)[rule] == level


@pytest.mark.parametrize(
    ("update", "rule"),
    [
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "CONFIG-QUANTIZATION-TWINS"),
        ({"quantization": {"bits": 8, "group_size": 64}}, "CONFIG-QUANTIZATION-TWINS"),
    ],
    ids=["mode", "bits"],
)
def test_two_quantization_blocks_that_differ(folders: Folders, update: dict[str, Any], rule: str) -> None:
    folders.edit(folders.drafter_4bit, "config.json", lambda config: config.update(update))
    assert rule in [finding["rule"] for finding in api.validate(folders.drafter_4bit)["findings"]]


def test_a_mode_that_the_tensors_do_not_have(folders: Folders) -> None:
    block = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    folders.edit(
        folders.drafter_4bit,
        "config.json",
        lambda config: config.update(quantization=block, quantization_config=block),
    )
    messages = [f["message"] for f in api.validate(folders.drafter_4bit)["findings"]]
    assert any("which is not mxfp4" in message for message in messages)


def test_a_module_that_config_calls_unquantized_and_is_not(folders: Folders) -> None:
    block = {"bits": 4, "group_size": 32, "mode": "affine", "lm_head": False}
    folders.edit(
        folders.drafter_4bit,
        "config.json",
        lambda config: config.update(quantization=block, quantization_config=block),
    )
    rules = [finding["rule"] for finding in api.validate(folders.drafter_4bit)["findings"]]
    assert "DRAFTER-TENSOR-PACKED" in rules


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("rms_norm_eps", 0, "CONFIG-NUMBER"),
        ("rms_norm_eps", "x", "CONFIG-NUMBER"),
        ("routed_scaling_factor", -1, "CONFIG-NUMBER"),
        ("routed_scaling_factor", [1], "CONFIG-NUMBER"),
        ("rope_scaling", {"type": "banana", "factor": -4}, "CONFIG-ROPE-SCALING"),
        ("rope_scaling", 3, "CONFIG-ROPE-SCALING"),
    ],
)
def test_a_number_no_model_can_have(folders: Folders, key: str, value: Any, rule: str) -> None:
    folders.edit(folders.drafter, "config.json", lambda config: config["text_config"].update({key: value}))
    report = api.validate(folders.drafter)
    assert report["verdict"] == "unsafe"
    assert rule in [finding["rule"] for finding in report["findings"]]


def changed(folder: Path, change: Any) -> dict[str, dict[str, Any]]:
    """Findings by rule id of a drafter folder after a change to its tensors, without its manifest."""
    (folder / MANIFEST).unlink(missing_ok=True)
    edit_tensors(folder, change)
    return {finding["rule"]: finding for finding in api.validate(folder)["findings"]}


@pytest.mark.parametrize("zero", [0, 0x8000], ids=["zero", "minus zero"])
@pytest.mark.parametrize("write", [qwen3_5.write_checkpoint, qwen4_exp.write_checkpoint])
@pytest.mark.parametrize(
    "name", ["pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "layers.0.self_attn.q_norm.weight"]
)
def test_a_norm_of_nothing_but_zeros_whatever_it_is_called(
    tmp_path: Path, name: str, write: Any, zero: int
) -> None:
    drafter = split(write(tmp_path / "raw"), tmp_path / "drafter")
    found = changed(drafter, altered(name, lambda words: np.full_like(words, zero)))
    assert found["DRAFTER-TENSOR-VALUES"]["where"] == name


def test_a_bias_may_be_zero(tmp_path: Path) -> None:
    drafter = split(glm4_moe.write_checkpoint(tmp_path / "raw", bias=True), tmp_path / "drafter")
    name = "layers.0.mtp_block.self_attn.q_proj.bias"
    assert changed(drafter, altered(name, np.zeros_like)) == {}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_rounded_tensor_is_named_in_whichever_layer_it_is(tmp_path: Path, layer: int) -> None:
    drafter = split(glm4_moe.write_checkpoint(tmp_path / "raw", depth=2), tmp_path / "drafter")
    name = f"layers.{layer}.mtp_block.mlp.gate.e_score_correction_bias"

    def rounded(tensors: Words) -> None:
        tensors[name] = ((tensors[name][0] >> 16).astype("<u2"), "BF16")

    finding = changed(drafter, rounded)["DRAFTER-TENSOR-ROUNDED"]
    assert finding["where"] == name
    assert finding["message"].startswith(f"{name} is BF16")


def test_more_layers_than_a_drafter_of_the_family_holds(folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders.drafter, tmp_path / "deep")
    (tmp_path / "deep" / "draftpair-manifest.json").unlink()
    config = json.loads((tmp_path / "deep" / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 2
    (tmp_path / "deep" / "config.json").write_text(json.dumps(config))
    report = api.validate(tmp_path / "deep")
    assert report["verdict"] == "unsafe"
    assert "CONFIG-HEAD-DEPTH" in {finding["rule"] for finding in report["findings"]}
