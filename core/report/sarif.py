"""Reports as SARIF 2.1.0: one run, each rule once, each finding a result with a place.

Code-scanning services show a result in the file it names, and tell old results from new ones by a fingerprint,
which depends on rule and place alone: a change of wording or of a number does not make a new alert. They want
paths, not names on the Hub, so a repository's name stands where its folder would.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from draftpair.report.places import Place, Places
from draftpair.report.subjects import ORDER, Report, exit_code, subjects
from draftpair.version import VERSION

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_MEANING = {0: "nothing speaks against it", 1: "the answer is no", 3: "could not look"}


def render(reports: Sequence[Report], strict: bool = False) -> str:
    """One SARIF log of all reports, as JSON text in ASCII."""
    judged = list(subjects(reports))
    found = [(subject, finding) for subject in judged for finding in subject.findings]
    rules = _rules([finding for _, finding in found])
    numbers = {rule["id"]: number for number, rule in enumerate(rules)}
    places, seen = Places(), Counter[str]()
    results = []
    for subject, finding in found:
        place = places.of(subject, finding)
        mark = _fingerprint(finding["rule"], place)
        seen[mark] += 1
        results.append(_result(finding, place, numbers[finding["rule"]], f"{mark}:{seen[mark]}"))
    code = exit_code(reports, strict)
    version = reports[0]["tool"]["version"] if reports else VERSION
    driver = {"name": "draftpair", "version": version, "rules": rules}
    invocation = {
        "executionSuccessful": code != 3,
        "exitCode": code,
        "exitCodeDescription": _MEANING[code],
    }
    verdicts = [{"subject": _text(subject.title), "verdict": subject.verdict} for subject in judged]
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": results,
        "properties": {"verdicts": verdicts},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rules(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each rule once, with the gravest level and the first hint that its findings have."""
    rules = []
    for rule in sorted({finding["rule"] for finding in findings}):
        own = [finding for finding in findings if finding["rule"] == rule]
        hint = next((finding["hint"] for finding in own if finding["hint"]), None)
        title = rule.replace("-", " ").capitalize()
        help_text = hint or f"{title}: the message says what was found and what was expected."
        rules.append(
            {
                "id": rule,
                "shortDescription": {"text": title},
                "help": {"text": _text(help_text)},
                "defaultConfiguration": {"level": min((f["level"] for f in own), key=ORDER.__getitem__)},
            }
        )
    return rules


def _result(finding: Mapping[str, Any], place: Place, rule: int, fingerprint: str) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": place.uri}}
    if place.line:
        physical["region"] = {"startLine": place.line}
    location: dict[str, Any] = {"physicalLocation": physical}
    if place.name:
        location["logicalLocations"] = [{"fullyQualifiedName": _text(place.name)}]
    return {
        "ruleId": finding["rule"],
        "ruleIndex": rule,
        "level": finding["level"],
        "message": {"text": _text("\n".join(filter(None, (finding["message"], finding["hint"]))))},
        "locations": [location],
        "partialFingerprints": {"primaryLocationLineHash": fingerprint},
        "properties": {"expected": _value(finding["expected"]), "found": _value(finding["found"])},
    }


def _fingerprint(rule: str, place: Place) -> str:
    name = json.dumps([rule, place.uri, place.name])
    return hashlib.sha256(name.encode("ascii")).hexdigest()[:16]


def _text(text: str) -> str:
    """The text without half surrogate pairs, which a strict reader of JSON refuses."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): _value(item) for key, item in value.items()}
    return [_value(item) for item in value] if isinstance(value, (list, tuple)) else value
