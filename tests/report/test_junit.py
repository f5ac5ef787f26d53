"""JUnit: well-formed XML whatever the values hold, a suite for each subject and a case for each rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest

from draftpair.report import render
from fixtures import reports

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reports.write_files(tmp_path)


def document(*several: dict[str, Any], strict: bool = False) -> Element:
    return fromstring(render(several, "junit", strict=strict).encode("utf-8"))


def outcomes(root: Element) -> dict[str, list[str]]:
    """Case to what it holds."""
    return {str(case.get("name")): [part.tag for part in case] for case in root.iter("testcase")}


def test_golden() -> None:
    text = render([reports.unsafe_report(), reports.unknown_report()], "junit")
    assert text + "\n" == (GOLDEN / "unsafe-and-unknown.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
@pytest.mark.parametrize("strict", [False, True])
def test_the_counts_are_those_of_the_cases(make: Callable[[], dict[str, Any]], strict: bool) -> None:
    root = document(make(), reports.unknown_report(), strict=strict)
    for element in (root, *root.iter("testsuite")):
        cases = list(element.iter("testcase"))
        counted = [sum(case.find(tag) is not None for case in cases) for tag in ("failure", "error")]
        assert [element.get(key) for key in ("failures", "errors")] == [str(number) for number in counted]
        assert element.get("tests") == str(len(cases))


def test_errors_fail_and_warnings_only_when_asked() -> None:
    usual = outcomes(document(reports.unsafe_report()))
    assert usual == {
        "verdict": ["failure"],
        "TARGET-TENSOR-SHAPE": ["failure"],
        "DRAFTER-TENSOR-VALUES": ["failure"],
        "CONFIG-ROPE-CONFLICT": ["system-out"],
        "INDEX-TOTAL-SIZE": ["system-out"],
        "PAIR-NO-PROVENANCE": ["system-out"],
    }
    strict = outcomes(document(reports.unsafe_report(), strict=True))
    warnings = {"CONFIG-ROPE-CONFLICT", "INDEX-TOTAL-SIZE"}
    assert {name for name in usual if usual[name] != strict[name]} == warnings
    assert all(strict[name] == ["failure"] for name in warnings)


def test_what_cannot_be_told_is_an_error() -> None:
    for strict in (False, True):
        found = outcomes(document(reports.unknown_report(), strict=strict))
        assert found["verdict"] == ["error"]
        assert found["DRAFTER-FAMILY-UNKNOWN"] == ["error"]


def test_a_suite_without_findings_still_shows_its_verdict() -> None:
    root = document(reports.sound_report())
    assert outcomes(root) == {"verdict": ["system-out"]}
    assert root.findtext(".//system-out") == "sound"


def test_a_doubtful_verdict_fails_only_when_asked() -> None:
    assert outcomes(document(reports.inspect_report()))["verdict"] == ["system-out"]
    assert outcomes(document(reports.inspect_report(), strict=True))["verdict"] == ["failure"]


def test_a_rule_is_one_case_with_all_its_findings() -> None:
    (case,) = document(reports.unsafe_report()).findall(".//testcase[@name='DRAFTER-TENSOR-VALUES']")
    assert case.get("file") == "drafter/model.safetensors"
    (failure,) = case
    assert (failure.get("message"), failure.get("type")) == ("it is all zeros", "error")
    text = str(failure.text)
    assert text.index("all zeros") < text.index("where: mtp.fc.weight") < text.index("hint: Split again.", 90)


def test_files_are_suites_of_their_own() -> None:
    suites = document(reports.check_report()).findall("testsuite")
    assert [suite.get("name") for suite in suites] == [
        "target/model.safetensors.index.json",
        "drafter/config.json",
    ]


def test_hostile_texts_stay_text() -> None:
    text = render(reports.hostile_report(), "junit", strict=True)
    assert text.isascii()
    root = fromstring(text)
    assert [element.tag for element in root.iter()] == [
        "testsuites", "testsuite", "testcase", "failure", "testcase", "failure", "testcase", "failure",
    ]  # fmt: skip
    failure = root.findall(".//failure")[1]
    for told in (str(failure.get("message")), str(failure.text)):
        assert "a\nb\\r::error::c %0A 100% <d> ]]> & \"e\" 'f'" in told
        assert "\\x1b[31m\\x00\\ud800\\ufffe" in told
        assert "é漢,:" in told
