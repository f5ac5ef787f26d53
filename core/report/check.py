"""The report of ``draftpair check`` as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.report.text import findings_text


def check_text(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each file, and what was found in it below."""
    for file in report["files"]:
        family = f" (a drafter of the family {file['family']})" if file["family"] else ""
        yield f"{file['file']}: {file['verdict']}{family}"
        yield from (f"  {line}" for line in findings_text(file["findings"]))
