"""What every format needs of a report, whichever command made it: what was judged, the verdict, the findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]

ORDER = {"error": 0, "warning": 1, "note": 2}
"""Levels, the gravest first."""

_EXIT = {"sound": 0, "proven": 0, "compatible": 0, "doubtful": 0, "unsafe": 1, "unknown": 3}


@dataclass(frozen=True)
class Subject:
    """One checkpoint, one pair or one file, as a report judged it.

    ``findings`` come errors first. Names in them are names in the folder of ``target`` or ``drafter``, for a file
    in the current folder; ``facts`` are those of a pair, else empty.
    """

    title: str
    verdict: str
    findings: tuple[Mapping[str, Any], ...]
    target: str = "."
    drafter: str | None = None
    facts: Mapping[str, Any] | None = None


def kind_of(report: Report) -> str:
    """The command that made a report, by the schema that it names: ``validate``, ``inspect``, ``check``."""
    return str(report["schema"]).split(":")[3]


def subjects(reports: Iterable[Report]) -> Iterator[Subject]:
    """What the reports judge, in their order; a report on files judges each of them."""
    for report in reports:
        if kind_of(report) == "check":
            for file in report["files"]:
                yield Subject(file["file"], file["verdict"], _sorted(file["findings"]))
        elif kind_of(report) == "inspect":
            findings = _sorted(report["integrity"]["findings"])
            model = report["inputs"]["model"]
            yield Subject(model, _verdict_of(findings), findings, model)
        else:
            target, drafter = report["inputs"]["target"], report["inputs"]["drafter"]
            title = target if drafter is None else f"{target} with {drafter}"
            findings = _sorted(report["findings"])
            yield Subject(title, report["verdict"], findings, target, drafter, report["facts"])


def exit_code(reports: Iterable[Report], strict: bool = False) -> int:
    """The code that the verdicts come to: 1 when any is unsafe, or doubtful with ``strict``; else 3 for unknown."""
    codes = {code_of(subject.verdict, strict) for subject in subjects(reports)}
    return 1 if 1 in codes else max(codes, default=0)


def code_of(verdict: str, strict: bool) -> int:
    """The exit code of one verdict."""
    return 1 if strict and verdict == "doubtful" else _EXIT[verdict]


def one_line(text: str) -> str:
    """The text with what does not print escaped: names and values must neither steer a terminal nor add lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _sorted(findings: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(sorted(findings, key=lambda finding: ORDER[finding["level"]]))


def _verdict_of(findings: Sequence[Mapping[str, Any]]) -> str:
    """`inspect` gives no verdict: its exit code says whether anything is malformed."""
    worst = findings[0]["level"] if findings else "note"
    return {"error": "unsafe", "warning": "doubtful", "note": "sound"}[worst]
