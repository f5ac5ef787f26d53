"""JSON: one shape at every verbosity, one report over many lines and several on one each."""

from __future__ import annotations

import json
from pathlib import Path

from draftpair.report import render
from draftpair.schemas import check, load_schema
from fixtures.reports import unknown_report, unsafe_report

GOLDEN = Path(__file__).parent / "golden"


def test_several_reports_are_one_on_each_line() -> None:
    text = render([unsafe_report(), unknown_report()], "json")
    assert text + "\n" == (GOLDEN / "unsafe-and-unknown.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == [unsafe_report(), unknown_report()]


def test_one_report_is_indented() -> None:
    text = render(unsafe_report(), "json")
    assert text.startswith('{\n  "schema"')
    assert json.loads(text) == unsafe_report()
    assert check(json.loads(text), load_schema("validate")) == []


def test_strictness_changes_no_key() -> None:
    assert render(unsafe_report(), "json", strict=True) == render(unsafe_report(), "json")
