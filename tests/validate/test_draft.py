"""What drafts: a folder of its own, a whole model, or the head in the target's own files; which kind is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.cli import run
from draftpair.families.rules import apply_rules
from draftpair.schemas import check, load_schema
from fixtures import ordinary, qwen3_5
from fixtures.folders import Folders
from fixtures.split_heads import Words, edit_config, edit_tensors
from fixtures.weights import write_safetensors


def outcome(target: Path, drafter: Path, **options: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Verdict, findings by rule, the report."""
    report = api.validate(target, drafter, **options)
    assert check(report, load_schema("validate")) == []
    return report["verdict"], {finding["rule"]: finding for finding in report["findings"]}, report


def test_a_target_as_its_own_drafter_means_its_head(tmp_path: Path) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    verdict, _, report = outcome(raw, raw)
    assert verdict == "proven"
    assert (report["pair"]["kind"], report["pair"]["drafter_family"]) == ("mtp", "qwen3_5_mtp")
    assert report["facts"]["drafter"]["embedded"] is True
    assert report["facts"]["provenance"]["detail"] == "the head lies in the target's own files"


def test_a_target_without_a_head_is_no_drafter_of_its_own(tmp_path: Path) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    edit_tensors(
        raw, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")]
    )
    verdict, found, _ = outcome(raw, raw)
    assert verdict == "unsafe"
    assert found["DRAFT-NO-EMBEDDED-HEAD"]["level"] == "error"
    assert "no tensor of an MTP head" in found["DRAFT-NO-EMBEDDED-HEAD"]["message"]


def test_an_incomplete_head_is_not_run_in_place(tmp_path: Path) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    edit_tensors(raw, lambda tensors: tensors.pop("mtp.fc.weight"))
    verdict, found, _ = outcome(raw, raw)
    assert verdict == "unsafe"
    assert "mtp.fc.weight" in found["HEAD-TENSOR-MISSING"]["message"]


def test_a_whole_model_with_a_head_could_be_meant_either_way(tmp_path: Path) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    other = shutil.copytree(raw, tmp_path / "other")
    verdict, found, _ = outcome(raw, other)
    assert verdict == "unknown"
    assert found["DRAFT-KIND-UNKNOWN"]["found"] == ["full-model", "mtp"]
    assert outcome(raw, other, draft_kind="mtp")[2]["pair"]["kind"] == "mtp"
    assert outcome(raw, other, draft_kind="full-model")[2]["pair"]["kind"] == "full-model"


def test_a_head_of_another_folder_is_held_to_the_target(tmp_path: Path) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    other = shutil.copytree(raw, tmp_path / "other")
    edit_config(other, lambda config: config.update(num_hidden_layers=7))
    verdict, found, report = outcome(raw, other, draft_kind="mtp")
    assert "PAIR-LAYERS" in found, report
    assert verdict == "doubtful"


def test_an_ordinary_model_drafts_as_such(folders: Folders) -> None:
    verdict, found, report = outcome(folders.target, folders.target, draft_kind="full-model")
    assert report["pair"]["drafter_family"] == "full_model"
    assert (verdict, set(found)) == ("compatible", {"PAIR-NO-ORIGIN"})
    assert report["facts"]["rollback"]["relation"] == "both"


def test_an_ordinary_model_in_another_folder_needs_no_kind(folders: Folders, tmp_path: Path) -> None:
    other = shutil.copytree(folders.target, tmp_path / "other")
    verdict, _, report = outcome(folders.target, other)
    assert (verdict, report["pair"]["kind"]) == ("compatible", "full-model")
    assert report["facts"]["kind"] == {"asked": None, "drafter": "full-model", "relation": "not asked"}


def test_a_model_whose_state_has_no_way_back_does_not_draft(tmp_path: Path) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    verdict, found, report = outcome(raw, raw, draft_kind="full-model")
    assert verdict == "unsafe"
    assert "linear attention" in found["PAIR-ROLLBACK"]["message"]
    assert report["facts"]["rollback"] | {"detail": None} == {
        "target": "no", "drafter": "no", "relation": "not both", "detail": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipes", "sides", "verdict"),
    [
        (("gemma3_text", "gemma3_text"), ("window", "window", "windows"), "compatible"),
        (("llama", "gemma3_text"), ("trim", "window", "windows"), "compatible"),
        (("gemma3_text", "llama"), ("window", "trim", "windows"), "compatible"),
        (("gemma3_text", "jamba"), ("window", "no", "not both"), "unsafe"),
        (("llama", "llama"), ("trim", "trim", "both"), "compatible"),
    ],
)
def test_a_sliding_window_is_told_and_is_no_obstacle(
    tmp_path: Path, recipes: tuple[str, str], sides: tuple[str, str, str], verdict: str
) -> None:
    target, drafter = (
        ordinary.write_model(tmp_path / str(seed), recipe, seed) for seed, recipe in enumerate(recipes)
    )
    told, found, report = outcome(target, drafter)
    rollback = report["facts"]["rollback"]
    assert (rollback["target"], rollback["drafter"], rollback["relation"]) == sides
    assert told == verdict, found
    assert ("PAIR-ROLLBACK-WINDOW" in found) == (sides[2] == "windows")
    assert ("PAIR-ROLLBACK" in found) == (sides[2] == "not both")


def test_an_ordinary_model_without_a_vocabulary_size(folders: Folders, tmp_path: Path) -> None:
    other = shutil.copytree(folders.target, tmp_path / "other")
    edit_config(other, lambda config: config.pop("vocab_size"))
    verdict, found, _ = outcome(folders.target, other)
    assert verdict == "unsafe"
    assert "vocab_size" in found["CONFIG-VOCABULARY"]["message"]


def test_a_larger_vocabulary_can_propose_ids_that_the_target_lacks(folders: Folders, tmp_path: Path) -> None:
    facts = api.validate(folders.target, shutil.copytree(folders.target, tmp_path / "o"))["facts"]
    facts["vocabulary"] |= {"relation": "padded", "larger": "drafter"}
    assert "PAIR-VOCAB-LARGER" in {finding.rule for finding in apply_rules(facts, "full_model", "pair")}
    facts["vocabulary"]["larger"] = "target"
    assert "PAIR-VOCAB-LARGER" not in {finding.rule for finding in apply_rules(facts, "full_model", "pair")}


@pytest.mark.parametrize("kind", ["dflash", "full-model", "eagle3"])
def test_a_kind_that_the_drafter_is_not_is_refused(folders: Folders, kind: str) -> None:
    verdict, found, report = outcome(folders.target, folders.drafter, draft_kind=kind)
    assert verdict == "unsafe"
    assert (found["DRAFT-KIND"]["expected"], found["DRAFT-KIND"]["found"]) == ("mtp", kind)
    assert report["facts"]["kind"]["relation"] == "different"


def test_the_kind_that_the_drafter_is_changes_nothing(folders: Folders) -> None:
    verdict, found, _ = outcome(folders.target, folders.drafter, draft_kind="mtp")
    assert (verdict, set(found)) == ("compatible", {"PAIR-DERIVED"})


def test_a_model_that_is_asked_for_its_head_and_has_none(folders: Folders, tmp_path: Path) -> None:
    other = shutil.copytree(folders.target, tmp_path / "other")
    verdict, found, _ = outcome(folders.target, other, draft_kind="mtp")
    assert verdict == "unsafe"
    assert "given as an MTP drafter" in found["DRAFT-NO-EMBEDDED-HEAD"]["message"]


def test_neither_a_drafter_nor_a_model(folders: Folders, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    write_safetensors(other / "model.safetensors", {})
    verdict, found, report = outcome(folders.target, other)
    assert verdict == "unknown"
    assert "'nonesuch'" in found["DRAFTER-FAMILY-UNKNOWN"]["message"]
    assert report["pair"] | {"target_family": None} == dict.fromkeys(
        ("target_family", "drafter_family", "kind", "block_size", "block_size_from")
    )


def test_no_weight_is_read_where_values_do_not_count(folders: Folders) -> None:
    def spoil(tensors: Words) -> None:
        words, dtype = tensors["model.enorm.weight"]
        tensors["model.enorm.weight"] = (np.full_like(words, 0x7FC0), dtype)

    edit_tensors(folders.drafter, spoil)
    assert outcome(folders.target, folders.drafter)[0] == "unsafe"
    assert "DRAFTER-TENSOR-VALUES" not in outcome(folders.target, folders.drafter, values=False)[1]


def test_the_environment_asks_for_a_kind_and_the_option_wins(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["validate", str(folders.target), str(folders.drafter)]
    monkeypatch.setenv("MLXCEL_DRAFT_KIND", "dflash")
    assert run(pair) == 1
    assert "DRAFT-KIND" in capsys.readouterr().out
    assert run([*pair, "--draft-kind", "mtp"]) == 0
    monkeypatch.setenv("LLAMA_ARG_DRAFT_KIND", "mtp")
    assert run(pair) == 0
    assert run(pair[:2]) == 0
