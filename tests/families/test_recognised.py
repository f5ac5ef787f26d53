"""Heads that are recognised and not split: what inspect and validate say of them, and how split-mtp refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.cli import run
from draftpair.errors import ToolError
from draftpair.families import Family, load_records
from fixtures.other_heads import OTHER_HEADS, OtherHead, write_other
from fixtures.split_heads import copied, edit_config, edit_tensors

PLACES = pytest.mark.parametrize("layout", OTHER_HEADS.values(), ids=OTHER_HEADS)


def findings(folder: Path) -> dict[str, dict[str, Any]]:
    return {finding["rule"]: finding for finding in api.validate(folder)["findings"]}


def refusal(folder: Path) -> ToolError:
    """What split-mtp says; nothing is written."""
    with pytest.raises(ToolError) as caught:
        api.split_mtp(folder, folder.parent / "drafter")
    assert not (folder.parent / "drafter").exists()
    return caught.value


def test_every_recognised_mtp_family_is_tested_here() -> None:
    recognised = {n for n, r in load_records().items() if not isinstance(r, Family) and r.kind == "mtp"}
    assert {layout.family for layout in OTHER_HEADS.values()} == recognised


@PLACES
def test_inspect_says_what_is_there_and_where(tmp_path: Path, layout: OtherHead) -> None:
    report = api.inspect(write_other(tmp_path / "raw", layout))
    assert report["checkpoint"]["role"] == "target"
    head = report["head"]
    assert head == {
        "family": layout.family,
        "present": True,
        "declared": bool(layout.declared),
        "complete": None,
        "prefix": layout.prefix,
        "layers_declared": layout.layers if layout.declared else None,
        "layers_found": layout.layers,
        "tensors": len(layout.head),
        "bytes": layout.nbytes,
        "dtypes": {"BF16": len(layout.head)},
        "files": [{"name": "model.safetensors", "indexed": True}],
        "missing": [],
    }


@PLACES
def test_a_head_in_a_file_of_its_own_is_found_there(tmp_path: Path, layout: OtherHead) -> None:
    file = "model-mtp-layer.safetensors"
    head = api.inspect(write_other(tmp_path / "raw", layout, file=file))["head"]
    assert (head["family"], head["tensors"]) == (layout.family, len(layout.head))
    assert [entry["name"] for entry in head["files"]] == [file]


@PLACES
def test_validate_notes_the_head_and_finds_nothing_wrong(tmp_path: Path, layout: OtherHead) -> None:
    folder = write_other(tmp_path / "raw", layout)
    assert api.validate(folder)["verdict"] == "sound"
    note = findings(folder)["HEAD-RECOGNISED"]
    assert (note["level"], note["where"], note["found"]) == ("note", layout.prefix, len(layout.head))
    assert layout.family in note["message"]
    assert str(load_records()[layout.family].unsupported) in note["message"]


@PLACES
def test_split_mtp_refuses_by_family_and_reason(tmp_path: Path, layout: OtherHead) -> None:
    error = refusal(write_other(tmp_path / "raw", layout))
    assert layout.family in error.message
    assert layout.prefix in error.message
    assert str(load_records()[layout.family].unsupported) in error.message
    assert "glm4_moe_lite" in str(error.hint)


@PLACES
def test_a_target_without_its_head_is_still_named(tmp_path: Path, layout: OtherHead) -> None:
    folder = write_other(tmp_path / "raw", layout, head=False)
    head = api.inspect(folder)["head"]
    assert (head["present"], head["tensors"], head["layers_found"]) == (False, 0, 0)
    assert (head["declared"], head["layers_declared"]) == (
        bool(layout.declared),
        layout.layers if layout.declared else None,
    )
    assert ("HEAD-ABSENT" in findings(folder)) == bool(layout.declared)
    error = refusal(folder)
    assert layout.family in error.message
    assert "without its head" in error.message


def test_minimax_m3_declares_seven_modules_and_holds_none(tmp_path: Path) -> None:
    folder = write_other(tmp_path / "raw", OTHER_HEADS["MiniMax-M3-VL"], head=False)
    absent = findings(folder)["HEAD-ABSENT"]
    assert (absent["expected"], absent["found"]) == (7, 0)
    assert absent["where"] == "config.json#/text_config/num_mtp_modules"
    assert "num_mtp_modules" in absent["message"]
    assert "MiniMaxAI/MiniMax-M3 repository does not" in absent["hint"]


@pytest.mark.parametrize(
    ("layout", "types"),
    [
        ("MiMo-V2-Flash", ("mimo_v2", "mimo_v2_flash")),
        ("Step-3.5", ("step3p5", "step3p7")),
        ("EXAONE MoE", ("exaone_moe", "exaone4_5")),
        ("LongCat-Flash", ("longcat_flash", "longcat_flash_ngram", "longcat_flash_sparse")),
        (
            "Ling",
            ("bailing_moe", "bailing_moe_v2", "bailing_moe_v2_5", "bailing_moe_linear", "bailing_moe_v3"),
        ),
        ("MiniMax-M3", ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_model_type_of_a_family_leads_to_it(
    tmp_path: Path, layout: str, types: tuple[str, ...]
) -> None:
    folder = write_other(tmp_path / "raw", OTHER_HEADS[layout])
    for model_type in types:
        edit_config(folder, lambda config: config.update(model_type=model_type))  # noqa: B023
        assert api.inspect(folder)["head"]["family"] == OTHER_HEADS[layout].family


def test_the_type_of_the_text_model_is_enough(tmp_path: Path) -> None:
    folder = write_other(tmp_path / "raw", OTHER_HEADS["Step-3.7"])
    document = json.loads((folder / "config.json").read_text())
    document["model_type"] = "a_wrapper"
    (folder / "config.json").write_text(json.dumps(document))
    assert api.inspect(folder)["head"]["family"] == "step3p5_mtp"


def test_exaone_is_not_taken_for_the_qwen_head_whose_names_it_has(tmp_path: Path) -> None:
    folder = write_other(tmp_path / "raw", OTHER_HEADS["EXAONE MoE"])
    assert "Qwen" in refusal(folder).message


def test_a_layer_too_many_is_no_head(tmp_path: Path) -> None:
    folder = write_other(tmp_path / "raw", OTHER_HEADS["Ling"], head=False)
    name = "model.layers.{}.input_layernorm.weight"
    edit_tensors(folder, copied(name.format(0), name.format(2)))
    assert not api.inspect(folder)["head"]["present"]


def test_the_command_line_exits_with_unsupported_and_lists_the_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_other(tmp_path / "raw", OTHER_HEADS["MiMo"])
    assert run(["split-mtp", "--model", str(folder), "--output", str(tmp_path / "drafter")]) == 3
    assert "mimo_mtp" in capsys.readouterr().err
    assert run(["inspect", str(folder)]) == 0
    assert "mimo_mtp" in capsys.readouterr().out
    assert run(["families"]) == 0
    assert "mimo_mtp" in capsys.readouterr().out
