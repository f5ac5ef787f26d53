"""The command line: exit codes, streams, and reports that are valid against the schema they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from draftpair.cli import cli, run
from draftpair.schemas import check, load_schema, schema_names
from fixtures.folders import Folders


def report_of(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the report on stdout, held against the schema that it names."""
    capsys.readouterr()
    code = run([*args, "--json"])
    out = capsys.readouterr().out
    report: dict[str, Any] = json.loads(out)
    name = str(report["schema"]).split(":")[3]
    assert check(report, load_schema(name)) == []
    return code, report


def test_inspect_says_what_a_raw_checkpoint_holds(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = report_of(capsys, "inspect", str(folders.raw), "--require-head")
    assert code == 0
    head = report["head"]
    assert (head["present"], head["declared"], head["complete"]) == (True, True, True)
    assert (head["prefix"], head["layers_found"], head["missing"]) == ("model.layers.3.", 1, [])
    assert head["dtypes"]["F32"] == 1
    assert {file["indexed"] for file in head["files"]} == {True}
    assert sum(report["sizes"]["groups"].values()) == report["sizes"]["tensor_bytes"]
    assert report["sizes"]["groups"]["head"] == head["bytes"]
    assert report["checkpoint"]["role"] == "target"


@pytest.mark.parametrize("drafter", [None, "drafter", "drafter_4bit", "raw"])
def test_the_memory_terms_sum_to_the_total(
    folders: Folders, capsys: pytest.CaptureFixture[str], drafter: str | None
) -> None:
    extra = ["--drafter", str(getattr(folders, drafter))] if drafter else []
    _, report = report_of(capsys, "inspect", str(folders.raw), *extra)
    memory = report["memory"]
    terms = [v for k, v in memory.items() if k.endswith("_bytes") and k not in _NO_TERMS]
    assert sum(terms) == memory["total_bytes"]
    assert (memory["drafter_bytes"] > 0) == (drafter is not None)


_NO_TERMS = ("kv_bytes_per_token", "total_bytes", "available_bytes")


def test_an_embedded_head_is_counted_once(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    _, alone = report_of(capsys, "inspect", str(folders.raw))
    _, own = report_of(capsys, "inspect", str(folders.raw), "--drafter", str(folders.raw))
    _, target = report_of(capsys, "inspect", str(folders.target))
    head, tensors = alone["head"]["bytes"], alone["sizes"]["tensor_bytes"]
    cache = own["memory"]["drafter_bytes"] - head
    assert alone["memory"]["weights_bytes"] == tensors
    assert own["memory"]["weights_bytes"] + head == tensors
    assert target["memory"]["weights_bytes"] == tensors - head
    assert 0 < cache == own["memory"]["kv_bytes"] // 3  # three decoder layers, one head layer


@pytest.mark.parametrize("damage", ["missing", "page"])
def test_nothing_is_said_to_fit_when_weights_are_missing(
    folders: Folders, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    shard = sorted(folders.raw.glob("*.safetensors"))[0]
    shard.unlink()
    if damage == "page":
        shard.write_text("<!DOCTYPE html><html>Sign in</html>")
    code, report = report_of(capsys, "inspect", str(folders.raw))
    memory = report["memory"]
    assert (code, memory["weights_bytes"], memory["total_bytes"], memory["fits"]) == (1, None, None, None)
    assert run(["inspect", str(folders.raw), "--require-fit", "--memory", "100GB"]) == 1
    assert "not known" in capsys.readouterr().out
    for path in folders.raw.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:1000])
    assert run(["inspect", str(folders.raw)]) == 1
    assert "cannot be told: weight files are missing or damaged" in capsys.readouterr().out


def test_a_drafter_is_recognised_as_one(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = report_of(capsys, "inspect", str(folders.drafter_4bit))
    about = report["checkpoint"]
    assert (code, about["role"], about["kind"], about["family"]) == (0, "drafter", "mtp", "glm4_moe_lite_mtp")
    assert report["head"]["present"] is False
    raw = report_of(capsys, "inspect", str(folders.drafter))[1]
    assert (
        report["sizes"]["parameters"] == raw["sizes"]["parameters"]
    )  # packed words count as what they stand for


def test_requirements_decide_the_exit_code(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folders.target), "--require-head"]) == 1
    assert "no whole head" in capsys.readouterr().err
    assert run(["inspect", str(folders.target), "--require-fit", "--memory", "1MB"]) == 1
    assert "not enough" in capsys.readouterr().err
    assert run(["inspect", str(folders.target), "--require-fit", "--memory", "1GB"]) == 0
    assert run(["inspect", str(folders.target), "--memory", "much"]) == 2


def test_a_declared_head_that_is_not_there_is_said(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = report_of(capsys, "inspect", str(folders.target))
    assert code == 0
    assert (report["head"]["present"], report["head"]["declared"], report["head"]["tensors"]) == (
        False,
        True,
        0,
    )
    assert [f["rule"] for f in report["integrity"]["findings"]] == ["HEAD-ABSENT"]
    run(["inspect", str(folders.target)])
    assert "no tensor of it is here" in capsys.readouterr().out


def test_split_writes_what_the_dry_run_promised(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    output = folders.raw.parent / "new"
    args = [
        "split-mtp",
        "--model",
        str(folders.raw),
        "--output",
        str(output),
        "--q-bits",
        "4",
        "--q-group-size",
        "32",
    ]
    code, planned = report_of(capsys, *args, "--dry-run")
    assert (code, planned["written"], output.exists()) == (0, False, False)
    code, done = report_of(capsys, *args)
    assert (code, done.pop("written"), planned.pop("written")) == (0, True, False)
    assert done == planned
    assert sorted(path.name for path in output.iterdir()) == done["files"]
    assert run([*args, "--force"]) == 0
    assert f"wrote {output}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "code", "text"),
    [
        (["--q-bits", "7"], 2, "2, 3, 4, 5, 6, 8"),
        (["--q-bits", "4", "--q-group-size", "16"], 2, "32, 64, 128"),
        (["--q-bits", "8", "--q-mode", "mxfp4"], 2, "mxfp4"),
        (["--block-size", "1"], 2, "minimum"),
        (["--block-size", "20000"], 2, "maximum"),
        (["--dtype", "int8"], 2, "int8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_wrong_usage_and_writes_nothing(
    folders: Folders, capsys: pytest.CaptureFixture[str], extra: list[str], code: int, text: str
) -> None:
    output = folders.raw.parent / "new"
    assert run(["split-mtp", "-m", str(folders.raw), "-o", str(output), *extra]) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""
    assert not output.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["target", "--jobs", "2"],
        ["--facts", "facts.json", "--jobs", "2"],
        ["--facts", "facts.json", "--draft-kind", "mtp"],
        ["--facts", "facts.json", "--draft-block-size", "3"],
        ["--facts", "facts.json", "--no-values"],
    ],
    ids=" ".join,
)
def test_an_option_that_would_decide_nothing_is_wrong_usage(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(folders.raw.parent)
    _, report = report_of(capsys, "validate", "target", "drafter")
    Path("facts.json").write_text(json.dumps(report["facts"]))
    option = next(word for word in reversed(words) if word.startswith("--")).replace("--no-", "--")
    assert run(["validate", *words]) == 2
    assert f"{option} " in capsys.readouterr().err


def test_a_line_that_cannot_be_understood_stops_no_other(
    folders: Folders, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = json.dumps({"target": str(folders.target), "drafter": str(folders.drafter)})
    other = json.dumps({"target": str(folders.target), "draft_kind": "mtp"})
    listed = tmp_path / "pairs.jsonl"
    listed.write_bytes("\n".join(['{"target": "modèle"}', other, good]).encode("latin-1"))
    assert run(["validate", "--pairs", str(listed), "--jobs", "1"]) == 2
    encoding, lonely, fine = map(json.loads, capsys.readouterr().out.splitlines())
    assert "not UTF-8" in encoding["error"]["message"]
    assert "draft_kind" in lonely["error"]["message"]
    assert fine["exit_code"] == 0


@pytest.mark.parametrize("output", ["", "a\0b"], ids=["empty", "NUL"])
def test_an_output_that_is_no_path_is_wrong_usage(
    folders: Folders, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    assert run(["split-mtp", "-m", str(folders.raw), "-o", output]) == 2
    assert "--output is" in capsys.readouterr().err


def test_a_quoted_tilde_in_the_output_is_the_home_folder(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folders.raw.parent))
    _, report = report_of(capsys, "split-mtp", "-m", "~/raw", "-o", "~/new", "--dry-run")
    assert report["output"] == str(folders.raw.parent / "new")


def test_json_reports_are_strict_whatever_a_checkpoint_says(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (folders.target / "config.json").read_text()
    odd = '"quantization": {"a": NaN, "b": [1e999, -Infinity]}'
    (folders.target / "config.json").write_text(config.replace("{", f"{{{odd},", 1))
    run(["validate", str(folders.target), str(folders.drafter), "--json"])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    report = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert report["facts"]["target"]["quantization"] == {"a": "NaN", "b": ["Infinity", "-Infinity"]}


@pytest.mark.parametrize("layers", [3 * 10**6, 10**12, 10**30])
def test_a_number_of_layers_that_no_model_has_is_not_counted_through(
    folders: Folders, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    folders.edit(folders.target, "config.json", lambda config: config.update(num_hidden_layers=layers))
    _, report = report_of(capsys, "inspect", str(folders.target))
    assert (report["memory"]["kv_bytes"], report["memory"]["total_bytes"]) == (None, None)
    (finding,) = [f for f in report["integrity"]["findings"] if f["rule"] == "MEMORY-UNKNOWN"]
    assert f"/num_hidden_layers is {layers}" in finding["message"]


def test_a_depth_that_is_no_number_is_not_reported_as_one(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    folders.edit(folders.target, "config.json", lambda config: config.update(num_nextn_predict_layers=True))
    _, report = report_of(capsys, "inspect", str(folders.target))
    assert report["head"]["layers_declared"] is None


def test_split_refuses_a_target_without_a_head(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    output = folders.raw.parent / "new"
    assert run(["split-mtp", "-m", str(folders.target), "-o", str(output)]) == 1
    assert "zai-org/GLM-4.7-Flash" in capsys.readouterr().err
    assert not output.exists()


def test_validate_grades_and_strictness(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = report_of(capsys, "validate", str(folders.target), str(folders.drafter))
    assert (code, report["verdict"]) == (0, "compatible")
    folders.edit(folders.target, "config.json", lambda config: config.update(rope_theta=5.0))
    code, report = report_of(capsys, "validate", str(folders.target), str(folders.drafter))
    assert (code, report["verdict"]) == (0, "doubtful")
    assert run(["validate", str(folders.target), str(folders.drafter), "--strict"]) == 1
    assert run(["validate", str(folders.target), str(folders.raw)]) == 3
    assert "to use the head, split it: draftpair split-mtp --model" in capsys.readouterr().out
    folders.edit(folders.target, "config.json", lambda config: config.update(hidden_size=32))
    assert run(["validate", str(folders.target), str(folders.drafter)]) == 1
    code, report = report_of(capsys, "validate", str(folders.raw))
    assert (code, report["verdict"], report["pair"], report["facts"]) == (0, "sound", None, {})
    assert run(["validate", str(folders.target), str(folders.drafter), "--format", "json"]) == 1


def test_json_is_alone_on_stdout_and_text_has_the_verdict_first(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["validate", str(folders.target), str(folders.drafter)])
    captured = capsys.readouterr()
    assert captured.out.startswith("compatible: ")
    assert captured.err == ""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["nonesuch"], 2),
        (["inspect"], 2),
        (["inspect", "./absent"], 3),
        (["inspect", "owner/never-downloaded"], 3),
        (["validate", "./absent", "./absent"], 3),
        (["schema", "nonesuch"], 2),
        (["--help"], 0),
        (["--version"], 0),
        (["families"], 0),
        (["schema"], 0),
        (["env"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_exit_codes(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert (captured.err == "") == (code == 0)


def test_summaries_are_the_first_sentences_of_the_commands() -> None:
    context = click.Context(cli)
    names = cli.list_commands(context)
    for name in names:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert isinstance(command.help, str)
        assert command.help.split(".\n")[0].rstrip(".") + "." == " ".join(_summary(name).split())


def _summary(name: str) -> str:
    from draftpair.cli import _SUMMARIES

    return _SUMMARIES[name]


def test_schema_and_families_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run(["schema", "--json"])
    assert tuple(json.loads(capsys.readouterr().out)["schemas"]) == schema_names()
    run(["schema", "families/glm4_moe_lite_mtp"])
    printed = json.loads(capsys.readouterr().out)
    shared = printed["$defs"].pop("urn:draftpair:schema:pair-rules:1.0")
    assert (printed, shared) == (load_schema("families/glm4_moe_lite_mtp"), load_schema("pair-rules"))
    run(["schema", "inspect"])
    assert json.loads(capsys.readouterr().out)["$defs"].keys() == {
        "urn:draftpair:schema:common:1.0",
        "urn:draftpair:schema:finding:1.0",
    }
    run(["families", "--json"])
    rows = {row["family"]: row for row in json.loads(capsys.readouterr().out)["families"]}
    assert rows["glm4_moe_lite_mtp"]["splits"]
    assert rows["glm4_moe_lite_mtp"]["targets"] == ["glm4_moe_lite"]
    assert {name for name, row in rows.items() if not row["splits"]} == {
        name for name, row in rows.items() if row["maturity"] in ("recognised", "checked")
    }


def test_a_reader_that_has_gone_is_no_error(folders: Folders) -> None:
    command = f"{sys.executable} -m draftpair schema inspect | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.split() == ["{", "0"]
    assert done.stderr == ""


def test_a_bug_is_told_as_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("draftpair.schemas.schema_names", broken)
    assert run(["schema"]) == 3
    assert "bug in draftpair: KeyError" in capsys.readouterr().err


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftpair.schemas.schema_names", interrupted)
    assert run(["schema"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_file_alone_can_be_inspected(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = report_of(capsys, "inspect", str(folders.target / "model.safetensors"))
    assert code == 0
    assert report["sizes"]["tensor_bytes"] > 0
    assert Path(report["inputs"]["model"]).name == "model.safetensors"
