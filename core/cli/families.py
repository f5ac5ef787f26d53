"""``draftpair families``: the records."""

from __future__ import annotations

import json

import click

from draftpair.cli._common import json_option


@click.command("families")
@json_option
def command(as_json: bool) -> None:
    """The families of drafters that draftpair knows."""
    from draftpair.families import load_families

    rows = [
        {
            "family": family.name,
            "title": family.title,
            "kind": family.kind,
            "maturity": family.maturity,
            "targets": list(family.target.model_types),
            "borrows": list(family.drafter.borrows),
        }
        for family in load_families().values()
    ]
    if as_json:
        click.echo(json.dumps({"families": rows}, indent=2))
        return
    for row in rows:
        click.echo(
            f"{row['family']:<22}{row['kind']:<8}{row['maturity']:<14}targets: {', '.join(row['targets'])}"
        )
