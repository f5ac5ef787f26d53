"""A manifest proves an origin only while nothing in the folder, and nothing in the target, was changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.schemas import check, load_schema
from fixtures.folders import Folders
from fixtures.weights import bf16_bits

Change = Callable[[Any], None]


def rules_of(report: dict[str, Any]) -> dict[str, str]:
    assert check(report, load_schema("validate")) == []
    return {finding["rule"]: finding["message"] for finding in report["findings"]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 0.1),
        ("routed_scaling_factor", 99.0),
        ("norm_topk_prob", False),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_a_changed_setting_of_the_drafter_is_doubtful(folders: Folders, key: str, value: Any) -> None:
    folders.edit(folders.drafter, "config.json", lambda config: config["text_config"].update({key: value}))
    report = api.validate(folders.raw, folders.drafter)
    assert report["verdict"] == "doubtful"
    rules = rules_of(report)
    assert key in rules["PAIR-SETTINGS"]
    assert "config.json" in rules["MANIFEST-FILES"]


def test_a_changed_tokenizer_file_of_the_drafter_is_doubtful_alone(folders: Folders) -> None:
    (folders.drafter / "generation_config.json").write_text("{}")
    report = api.validate(folders.drafter)
    assert report["verdict"] == "doubtful"
    assert "generation_config.json" in rules_of(report)["MANIFEST-FILES"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(family="other_mtp"),
        lambda m: m.update(tap="pre_norm"),
        lambda m: m.update(fusion="hidden, embedding"),
        lambda m: m["block_size"].update(value=7),
        lambda m: m.update(quantization={"bits": 8, "group_size": 64, "mode": "affine"}),
    ],
    ids=["family", "tap", "fusion", "block size", "quantization"],
)
def test_a_manifest_that_contradicts_the_drafter_is_an_error(folders: Folders, change: Change) -> None:
    folders.edit(folders.drafter_4bit, MANIFEST, change)
    report = api.validate(folders.raw, folders.drafter_4bit)
    assert report["verdict"] == "unsafe"
    assert "MANIFEST-CONTENT" in rules_of(report)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["source"].update(revision=1),
        lambda m: m["source"].update(revision=True),
        lambda m: m.pop("tensors"),
        lambda m: m["source"].update(fingerprint={}),
        lambda m: m.update(extra=1),
    ],
    ids=["number", "bool", "missing", "fingerprint", "unknown key"],
)
def test_a_malformed_manifest_is_named(folders: Folders, change: Change) -> None:
    folders.edit(folders.drafter, MANIFEST, change)
    report = api.validate(folders.raw, folders.drafter)
    assert report["verdict"] == "unsafe"
    assert "MANIFEST-PARSE" in rules_of(report)


def overwrite(folder: Path, name: str, values: np.ndarray) -> None:
    tensor = open_checkpoint(folder).tensors[name]
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.begin)
        file.write(bf16_bits(values.astype("f4")).tobytes())


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.o_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.2.mlp.experts.7.up_proj.weight",
    ],
)
def test_other_weights_behind_the_same_norms_are_not_proven(folders: Folders, name: str) -> None:
    shape = open_checkpoint(folders.raw).tensors[name].shape
    overwrite(folders.raw, name, np.full(shape, 0.25))
    report = api.validate(folders.raw, folders.drafter)
    assert report["verdict"] == "doubtful"
    assert "a fine-tune, or a damaged copy" in rules_of(report)["PAIR-PROVENANCE"]


def test_another_config_of_the_target_is_not_proven(folders: Folders) -> None:
    folders.edit(folders.raw, "config.json", lambda config: config.update(max_position_embeddings=7))
    report = api.validate(folders.raw, folders.drafter)
    assert report["verdict"] == "compatible"
    assert "the config.json is not" in rules_of(report)["PAIR-DERIVED"]


def test_a_drafter_cut_from_a_partial_download_says_so_and_proves_nothing(
    folders: Folders, tmp_path: Path
) -> None:
    head = {
        tensor.file for tensor in open_checkpoint(folders.raw).tensors.values() if ".layers.3." in tensor.name
    }
    other = next(path for path in sorted(folders.raw.glob("*.safetensors")) if path.name not in head)
    aside = tmp_path / "aside"
    other.rename(aside)
    split = api.split_mtp(folders.raw, tmp_path / "drafter")
    assert "SPLIT-SOURCE-PARTIAL" in [finding["rule"] for finding in split["findings"]]
    aside.rename(other)
    report = api.validate(folders.raw, tmp_path / "drafter")
    assert report["verdict"] == "compatible"
    assert "PAIR-PROVENANCE-PARTIAL" in rules_of(report)
