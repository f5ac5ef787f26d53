"""``draftpair schema``: the shipped JSON schemas."""

from __future__ import annotations

import json

import click

from draftpair.cli._common import emit, json_option


@click.command("schema")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """The JSON schemas of the reports and families.

    Prints the one called NAME, with those it refers to inside it; without NAME, lists the names.
    """
    from draftpair.schemas import bundled, load_schema, schema_names

    if name is not None:
        click.echo(json.dumps(bundled(name), indent=2))
    else:
        emit({"schemas": {n: load_schema(n)["$id"] for n in schema_names()}}, as_json, lambda r: r["schemas"])
