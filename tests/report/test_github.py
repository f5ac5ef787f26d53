"""GitHub: commands that the runner reads as they are meant, and a table that shows values as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftpair.report import render
from draftpair.report.github import summary
from fixtures import reports

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reports.write_files(tmp_path)


def unescaped(text: str, also: dict[str, str] | None = None) -> str:
    """What the runner makes of a value: the escapes that it knows, the percent sign last."""
    for escape, character in {"%0D": "\r", "%0A": "\n", **(also or {}), "%25": "%"}.items():
        text = text.replace(escape, character)
    return text


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Name, properties and message of each command, taken apart as the runner does it."""
    found = []
    for line in text.split("\n"):
        if match := re.fullmatch(r"::(\w+) (.*?)::(.*)", line):
            pairs = (part.partition("=") for part in match[2].split(","))
            also = {"%3A": ":", "%2C": ","}
            properties = {key: unescaped(value, also) for key, _, value in pairs}
            found.append((match[1], properties, unescaped(match[3])))
    return found


def test_golden() -> None:
    several = [reports.unsafe_report(), reports.unknown_report(), reports.sound_report()]
    text = render(several, "github") + "\n"
    assert text == (GOLDEN / "unsafe-and-unknown.github").read_text(encoding="utf-8")
    assert summary(several) == (GOLDEN / "unsafe-and-unknown.md").read_text(encoding="utf-8")


def test_errors_come_first_across_reports() -> None:
    found = commands(render([reports.unknown_report(), reports.unsafe_report()], "github"))
    levels = [name for name, _, _ in found]
    assert levels == ["error"] * 3 + ["warning"] * 3 + ["notice"] * 2


def test_a_command_names_file_line_and_rule() -> None:
    found = commands(render(reports.unsafe_report(), "github"))
    by_title = {properties["title"]: (properties, message) for _, properties, message in found}
    properties, message = by_title["draftpair CONFIG-ROPE-CONFLICT"]
    assert (properties["file"], properties["line"]) == ("target/config.json", "5")
    assert message == "target: rope_theta differs\nMake both equal."
    assert "line" not in by_title["draftpair TARGET-TENSOR-SHAPE"][0]


@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
def test_every_line_is_a_command_or_the_count(make: Callable[[], dict[str, Any]]) -> None:
    text = render(make(), "github")
    *lines, last = text.split("\n")
    assert len(commands(text)) == len(lines)
    assert re.fullmatch(r"draftpair: \d \w+(, \d \w+)*", last)


def test_hostile_texts_start_no_command_and_do_not_steer_the_log() -> None:
    text = render(reports.hostile_report(), "github")
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text.split("\n")) == 3
    (_, properties, message), (_, other, _) = commands(text)
    assert set(properties) == {"file", "title"}
    assert other["title"] == "draftpair CONFIG-WORDS"
    assert message.startswith("a\nb\n::error::c %0A 100% <d> ]]>")
    assert "\\x1b[31m\\x00\\ud800" in message


def test_hostile_texts_stay_in_their_cell() -> None:
    text = summary([reports.hostile_report()])
    rows = [line for line in text.split("\n") if line.startswith("| error")]
    assert len(rows) == 1
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 5
    assert "<d>" not in text
    assert "&lt;d&gt;" in text
    assert re.search(r"(?<!\\)`", text) is None
    assert all(line.isprintable() for line in text.split("\n"))


def test_without_findings_the_summary_has_no_table() -> None:
    assert summary([reports.sound_report()]) == "### draftpair: sound\n\ntarget\n\n"
    assert render([], "github") == "draftpair: nothing to judge"
