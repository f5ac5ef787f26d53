"""Reports as JUnit XML, as GitLab, Jenkins and others show it: a suite for each subject, a test case for each rule.

The first case of a suite is the verdict, so that there is something to show where nothing was found. Errors are
failures, warnings only when they are asked to be, and a check that could not be made is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from draftpair.report.places import Places
from draftpair.report.subjects import Report, Subject, code_of, subjects

# What XML 1.0 has no way to hold, not even as a reference; a bare carriage return is read as a line feed.
_UNFIT = re.compile("[^\t\n\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(reports: Sequence[Report], strict: bool = False) -> str:
    """One JUnit document of all reports, in ASCII."""
    root, places = Element("testsuites", name="draftpair"), Places()
    for subject in subjects(reports):
        _suite(root, subject, places, strict)
    _count(root)
    indent(root)
    text = tostring(root, encoding="unicode").encode("ascii", "xmlcharrefreplace").decode("ascii")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'


def _suite(root: Element, subject: Subject, places: Places, strict: bool) -> None:
    suite = SubElement(root, "testsuite", name=_fit(subject.title))
    verdict = _case(suite, subject, "verdict")
    code = code_of(subject.verdict, strict)
    if code:
        SubElement(verdict, "error" if code == 3 else "failure", message=subject.verdict, type="verdict")
    else:
        SubElement(verdict, "system-out").text = subject.verdict
    for rule in dict.fromkeys(finding["rule"] for finding in subject.findings):
        own = [finding for finding in subject.findings if finding["rule"] == rule]
        case = _case(suite, subject, rule)
        case.set("file", _fit(places.of(subject, own[0]).path))
        _outcome(case, own, strict)
    _count(suite)


def _case(suite: Element, subject: Subject, name: str) -> Element:
    return SubElement(suite, "testcase", classname=_fit(subject.title), name=name)


def _outcome(case: Element, findings: Sequence[Mapping[str, Any]], strict: bool) -> None:
    """What all findings of one rule come to; the first is the gravest."""
    level, text = findings[0]["level"], _fit("\n\n".join(map(_told, findings)))
    if level != "error" and findings[0]["rule"].endswith("-UNKNOWN"):
        outcome = "error"
    elif level == "error" or (strict and level == "warning"):
        outcome = "failure"
    else:
        SubElement(case, "system-out").text = text
        return
    SubElement(case, outcome, message=_fit(findings[0]["message"]), type=level).text = text


def _told(finding: Mapping[str, Any]) -> str:
    lines = [f"{finding['level']}: {finding['message']}"]
    for key in ("where", "expected", "found", "hint"):
        value = finding[key]
        if value is not None:
            lines.append(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def _count(parent: Element) -> None:
    """How many cases there are below, and how many of them failed or could not be told."""
    for name, path in (("tests", ".//testcase"), ("failures", ".//failure"), ("errors", ".//error")):
        parent.set(name, str(len(parent.findall(path))))


def _fit(text: str) -> str:
    return _UNFIT.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
