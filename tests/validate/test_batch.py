"""A list of pairs: one line out for each line in, in their order, whatever is wrong with some of them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.cli import run
from draftpair.errors import Usage
from draftpair.schemas import check, load_schema
from draftpair.validate.batch import parse_line
from fixtures.folders import Folders


def line(target: Path | str, drafter: Path | str | None = None, **rest: Any) -> str:
    return json.dumps({"target": str(target), "drafter": None if drafter is None else str(drafter), **rest})


def results(lines: list[str], jobs: int = 1) -> list[dict[str, Any]]:
    found = list(api.validate_pairs(lines, jobs=jobs))
    for result in found:
        assert check(result, load_schema("validate-line")) == []
    return found


def test_each_line_is_judged_as_alone(folders: Folders) -> None:
    lines = [
        line(folders.target, folders.drafter),
        line(folders.raw),
        line(folders.raw, folders.drafter_4bit),
    ]
    found = results(lines)
    assert [result["report"] for result in found] == [
        api.validate(str(folders.target), str(folders.drafter)),
        api.validate(str(folders.raw)),
        api.validate(str(folders.raw), str(folders.drafter_4bit)),
    ]
    assert [result["report"]["verdict"] for result in found] == ["compatible", "sound", "proven"]


def test_no_bad_line_stops_the_rest(folders: Folders) -> None:
    good = line(folders.target, folders.drafter)
    bad = [
        "nonsense",
        "[1]",
        '{"drafter": "x"}',
        '{"target": "x", "colour": 1}',
        '{"target": 5}',
        "[" * 100_000,
    ]
    bad += [line(folders.raw / "nowhere"), line(folders.target, folders.drafter, draft_block_size=99)]
    found = results([item for wrong in bad for item in (wrong, good)])
    assert [result["line"] for result in found] == list(range(1, 2 * len(bad) + 1))
    assert [result["exit_code"] for result in found[1::2]] == [0] * len(bad)
    assert [result["exit_code"] for result in found[::2]] == [2, 2, 2, 2, 2, 2, 3, 2]
    assert all(result["error"]["message"] and result["report"] is None for result in found[::2])
    assert found[0]["input"] is None
    assert found[12]["input"]["target"] == str(folders.raw / "nowhere")


def test_blank_lines_count_and_say_nothing(folders: Folders) -> None:
    found = results(["", line(folders.raw), "   \n", line(folders.target)])
    assert [result["line"] for result in found] == [2, 4]


def test_several_processes_give_the_same_in_the_same_order(folders: Folders) -> None:
    lines = [line(side, folders.drafter) for side in (folders.target, folders.raw)] * 20 + ["nonsense"]
    assert results(lines, jobs=2) == results(lines)


def test_kind_and_width_are_those_of_the_line(folders: Folders) -> None:
    asked = line(folders.target, folders.drafter, draft_kind="mtp", draft_block_size=3)
    other = line(folders.target, folders.drafter, draft_kind="dflash")
    first, second = results([asked, other])
    assert first["report"]["pair"]["block_size"] == 3
    assert (second["exit_code"], second["report"]["verdict"]) == (1, "unsafe")


def test_a_key_that_is_null_is_one_that_was_left_out() -> None:
    left_out = parse_line('{"target": "a/b"}')
    assert left_out == parse_line(
        '{"target": "a/b", "drafter": null, "draft_kind": null, "draft_block_size": null}'
    )
    with pytest.raises(Usage, match="draft_block_size is true"):
        parse_line('{"target": "a/b", "draft_block_size": true}')


@pytest.mark.parametrize(
    ("extra", "strict", "code"),
    [
        ([], False, 0),
        (["nonsense"], False, 2),
        (['{"target": "./none"}', "x"], False, 3),
        (["unsafe", "x"], False, 1),
    ],
    ids=["good", "usage", "unreadable", "unsafe"],
)
def test_the_gravest_line_decides_the_exit_code(
    folders: Folders,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    strict: bool,
    code: int,
) -> None:
    unsafe = line(folders.target, folders.drafter, draft_kind="dflash")
    lines = [line(folders.target, folders.drafter), *(unsafe if item == "unsafe" else item for item in extra)]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    assert run(["validate", "--pairs", "-", "--jobs", "1"]) == code
    assert len(capsys.readouterr().out.splitlines()) == len(lines)


def test_strict_counts_doubt(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders.edit(folders.target, "config.json", lambda config: config.update(rope_theta=5.0))
    listed = tmp_path / "pairs.jsonl"
    listed.write_text(line(folders.target, folders.drafter))
    assert run(["validate", "--pairs", str(listed)]) == 0
    assert run(["validate", "--pairs", str(listed), "--strict"]) == 1


@pytest.mark.parametrize(
    "extra", [["x"], ["--json"], ["--format", "sarif"], ["--draft-kind", "mtp"], ["--facts", "-"]]
)
def test_what_does_not_go_with_a_list(
    tmp_path: Path, extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "pairs.jsonl"
    listed.write_text("")
    assert run(["validate", "--pairs", str(listed), *extra]) == 2
    assert "--pairs" in capsys.readouterr().err


def test_facts_that_another_tool_made(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = api.validate(folders.target, folders.drafter)
    document = tmp_path / "facts.json"
    document.write_text(json.dumps(report["facts"]))
    assert run(["validate", "--facts", str(document), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert check(judged, load_schema("validate")) == []
    assert (judged["verdict"], judged["facts"]) == (report["verdict"], report["facts"])
    report["facts"]["hidden"] |= {"drafter": 1, "relation": "different"}
    document.write_text(json.dumps(report["facts"]))
    assert run(["validate", "--facts", str(document)]) == 1
    assert "PAIR-HIDDEN-SIZE" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "urn:draftpair:schema:pair-facts:1.1"}'])
def test_facts_that_are_none(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "facts.json"
    document.write_text(text)
    assert run(["validate", "--facts", str(document)]) == 2
    assert "error" in capsys.readouterr().err


def test_a_bug_on_a_line_stops_no_other(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("draftpair.validate.validate_pair", fails)
    first, second = results([line(folders.target, folders.drafter), line(folders.raw)])
    assert (first["exit_code"], second["exit_code"]) == (3, 0)
    assert "this is a bug in draftpair: ZeroDivisionError: on purpose" in first["error"]["message"]


_KILLED = """
import os, signal, time
from draftpair import cli
from draftpair.validate.batch import validate_lines

def judge(line):
    if "die" in line.text:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, cli._end)  # as the command has it
    for result in validate_lines([f'{{"target": "{name}"}}' for name in ("wait", "die", "next", "last")], judge, 2):
        print(result["line"], result["exit_code"], result["error"]["message"])
"""


def test_a_process_that_is_killed_ends_its_lines_and_not_the_command(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_KILLED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    told = "3 the process that was to judge this pair, or one beside it, was ended"
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [f"{number} {told}" for number in range(1, 5)],
    ), done.stderr
