"""What the assistant of the Gemma 4 model without towers has of its own; the rest is tested with gemma4_assistant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.families import load_families
from fixtures.gemma4_assistant import write_drafter
from fixtures.weights import write_json

FAMILY = "gemma4_unified_assistant"


def levels(folder: Path, **changes: Any) -> tuple[str, dict[str, str]]:
    """The verdict and the level by rule, after changes of text_config."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config["text_config"].pop(key) if value is None else config["text_config"].update({key: value})
    write_json(folder / "config.json", config)
    report = api.validate(folder)
    return report["verdict"], {finding["rule"]: finding["level"] for finding in report["findings"]}


def test_its_targets_are_the_models_without_towers() -> None:
    record = load_families()[FAMILY]
    assert record.target.model_types == ("gemma4_unified", "gemma4_unified_text")
    assert record.drafter.shared_kv == load_families()["gemma4_assistant"].drafter.shared_kv
    assert record.rules == load_families()["gemma4_assistant"].rules


def test_a_config_without_inputs_by_layer_is_what_transformers_saves_and_mlx_vlm_misreads(
    tmp_path: Path,
) -> None:
    folder = write_drafter(tmp_path / "drafter", family=FAMILY)
    assert levels(folder, hidden_size_per_layer_input=None) == (
        "doubtful",
        {"CONFIG-PER-LAYER-INPUT-UNSTATED": "warning"},
    )


def test_the_other_assistant_has_to_state_it(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")
    verdict, rules = levels(folder, hidden_size_per_layer_input=None)
    assert verdict == "unsafe"
    assert rules["CONFIG-PER-LAYER-INPUT"] == "error"
    folder = write_drafter(tmp_path / "second")
    assert levels(folder, vocab_size_per_layer_input=None) == (
        "doubtful",
        {"CONFIG-PER-LAYER-VOCABULARY": "warning"},
    )


@pytest.mark.parametrize("text_type", ["gemma4_text", "gemma4_unified"])
def test_the_text_model_of_another_kind_is_unsafe(tmp_path: Path, text_type: str) -> None:
    folder = write_drafter(tmp_path / "drafter", family=FAMILY)
    verdict, rules = levels(folder, model_type=text_type)
    assert verdict == "unsafe"
    assert rules["CONFIG-TEXT-MODEL-TYPE"] == "error"
