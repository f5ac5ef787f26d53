"""Verdicts: what a list of findings comes to, and what the verdict rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.findings import Finding, by_severity, has_errors, has_warnings

PASSING = ("proven", "compatible")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a validation. ``fetched`` are the bytes read from the Hub, of target and drafter.

    ``name`` is sound, doubtful, unsafe or unknown for one checkpoint, and proven, compatible, doubtful, unsafe
    or unknown for a pair. ``pair``, ``facts`` and ``questions`` are as the report has them; None and empty for one
    checkpoint.
    """

    name: str
    inputs: dict[str, Any]
    findings: tuple[Finding, ...]
    pair: dict[str, Any] | None
    facts: dict[str, Any]
    questions: tuple[dict[str, str], ...] = ()
    fetched: tuple[int | None, int | None] = (None, None)

    def body(self) -> dict[str, Any]:
        """What ``draftpair validate`` reports, errors first."""
        return {
            "verdict": self.name,
            "pair": self.pair,
            "findings": [finding.as_dict() for finding in by_severity(self.findings)],
            "facts": self.facts,
            "questions": list(self.questions),
            "fetched_bytes": dict(zip(("target", "drafter"), self.fetched, strict=True)),
        }


def grade(findings: Sequence[Finding], best: str) -> str:
    """The verdict that findings allow: ``best`` when no warning or error stands against it.

    A finding whose rule id ends in ``-UNKNOWN`` means that a check could not be made.
    """
    if has_errors(findings):
        return "unsafe"
    if any(finding.rule.endswith("-UNKNOWN") for finding in findings):
        return "unknown"
    return "doubtful" if has_warnings(findings) else best


def inputs_of(target: Checkpoint, drafter: Checkpoint | None = None) -> dict[str, Any]:
    """What was judged, as reports have it: two checkpoints, or a target alone."""
    return {
        "target": target.source,
        "drafter": drafter.source if drafter else None,
        "target_revision": target.revision,
        "drafter_revision": drafter.revision if drafter else None,
    }
