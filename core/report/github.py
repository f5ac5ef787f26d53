"""Reports as GitHub shows them: a workflow command for each finding, and a table for the job's summary.

A runner shows only the first few commands of a step, so errors come first, across all reports. Whatever a value
holds, it can neither start a command of its own nor leave its cell of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from draftpair.report.places import Place, Places
from draftpair.report.subjects import ORDER, Report, one_line, subjects

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_MARKUP = re.compile(r"([\\`*_\[\]|~$#!])")


def render(reports: Sequence[Report], strict: bool = False) -> str:
    """A workflow command a line, then a line that counts the verdicts; ``strict`` changes nothing here."""
    places, found = Places(), []
    for subject in subjects(reports):
        for finding in subject.findings:
            text = "\n".join(filter(None, (finding["message"], finding["hint"])))
            properties = _properties(places.of(subject, finding), f"draftpair {finding['rule']}")
            found.append(
                (ORDER[finding["level"]], f"::{_COMMANDS[finding['level']]} {properties}::{_data(text)}")
            )
    lines = [line for _, line in sorted(found, key=lambda entry: entry[0])]
    verdicts = [subject.verdict for subject in subjects(reports)]
    counted = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
    return "\n".join([*lines, f"draftpair: {counted or 'nothing to judge'}"])


def summary(reports: Sequence[Report]) -> str:
    """Markdown for the file that ``GITHUB_STEP_SUMMARY`` names: the verdicts, then every finding in a table."""
    return "\n".join(_summary(reports)) + "\n"


def _summary(reports: Sequence[Report]) -> Iterator[str]:
    places = Places()
    for subject in subjects(reports):
        yield f"### draftpair: {subject.verdict}"
        yield ""
        yield _cell(subject.title)
        yield ""
        if not subject.findings:
            continue
        yield "| level | rule | message | where |"
        yield "| --- | --- | --- | --- |"
        for finding in subject.findings:
            place = places.of(subject, finding)
            where = f"{place.path}:{place.line}" if place.line else place.path
            text = "<br>".join(_cell(part) for part in (finding["message"], finding["hint"]) if part)
            yield f"| {finding['level']} | {finding['rule']} | {text} | {_cell(where)} |"
        yield ""


def _properties(place: Place, title: str) -> str:
    stated = [("file", place.path), ("line", str(place.line) if place.line else None), ("title", title)]
    return ",".join(f"{key}={_property(value)}" for key, value in stated if value)


def _data(text: str) -> str:
    """A command's text: what would end the line is escaped as the runner undoes it, the rest that does not print
    as a reader can read it.
    """
    lines = text.replace("%", "%25").splitlines()
    return "%0A".join(map(one_line, lines))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _cell(text: str) -> str:
    """Text for Markdown that is to be read as it stands."""
    return escape(_MARKUP.sub(r"\\\1", one_line(text)), quote=False)
