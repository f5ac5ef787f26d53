"""Findings: what a check has to say. A failed check is a finding, never an exception."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "note"]

_SEVERITY: dict[str, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """One thing a rule noticed.

    ``rule`` is a stable id such as ``INDEX-TENSOR-ABSENT``; ``where`` names the file, tensor or JSON
    pointer; ``expected`` and ``found`` are JSON values or None; ``hint`` says what to do next.
    """

    rule: str
    level: Level
    message: str
    where: str | None = None
    expected: Any = None
    found: Any = None
    hint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The finding as the reports' JSON has it: every key present, unknown values null."""
        return asdict(self)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; the order inside a level is kept."""
    return sorted(findings, key=lambda finding: _SEVERITY[finding.level])


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.level == "error" for finding in findings)


def has_warnings(findings: Iterable[Finding]) -> bool:
    """Whether any finding is a warning."""
    return any(finding.level == "warning" for finding in findings)
