"""``draftpair families``: the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from draftpair.cli._common import emit, json_option


@click.command("families")
@json_option
def command(as_json: bool) -> None:
    """The families of drafters that draftpair knows."""
    from draftpair.families import Family, SplitFamily, load_records

    rows = [
        {
            "family": family.name,
            "title": family.title,
            "kind": family.kind,
            "maturity": family.maturity,
            "targets": list(family.target.model_types),
            "splits": isinstance(family, SplitFamily),
            "borrows": list(family.drafter.borrows) if isinstance(family, Family) else [],
            "notes": family.notes or family.unsupported,
        }
        for family in load_records().values()
    ]
    emit({"families": rows}, as_json, _text)


def _text(report: Mapping[str, Any]) -> Iterator[str]:
    for row in report["families"]:
        targets = ", ".join(row["targets"]) or "any"
        yield f"{row['family']:<26}{row['kind']:<12}{row['maturity']:<14}targets: {targets}"
