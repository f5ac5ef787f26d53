"""``draftpair schema``: the shipped JSON schemas."""

from __future__ import annotations

import json

import click

from draftpair.cli._common import json_option


@click.command("schema")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """The JSON schemas of the reports and families.

    Prints the one called NAME; without NAME, lists the names.
    """
    from draftpair.schemas import load_schema, schema_names

    if name is not None:
        click.echo(json.dumps(load_schema(name), indent=2))
    elif as_json:
        click.echo(json.dumps({"schemas": {n: load_schema(n)["$id"] for n in schema_names()}}, indent=2))
    else:
        click.echo("\n".join(schema_names()))
