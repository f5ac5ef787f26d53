"""``draftpair inspect``: what is in a checkpoint, from its headers alone."""

from __future__ import annotations

import click

from draftpair.cli._common import emit, json_option, revision_option


@click.command("inspect")
@click.argument("model")
@click.option("--drafter", metavar="DRAFTER", help="Count this drafter in; MODEL itself means its own head.")
@click.option(
    "--context", type=click.IntRange(min=1), default=8192, show_default=True, help="Tokens in the cache."
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at a time."
)
@click.option(
    "--kv-bits",
    type=click.Choice(["4", "8", "16", "32"]),
    default="16",
    show_default=True,
    help="Bits of the cache.",
)
@click.option("--memory", metavar="LIMIT", help="Memory to fit into, such as 24GB; default: this machine's.")
@click.option("--require-head", is_flag=True, help="Exit 1 unless MODEL holds a whole head.")
@click.option("--require-fit", is_flag=True, help="Exit 1 unless the memory is enough.")
@revision_option
@json_option
def command(
    model: str,
    drafter: str | None,
    context: int,
    batch: int,
    kv_bits: str,
    memory: str | None,
    require_head: bool,
    require_fit: bool,
    revision: str | None,
    as_json: bool,
) -> int:
    """What a checkpoint holds, whether its head is whole, and how much memory it needs.

    \b
    Examples:
      draftpair inspect ./GLM-4.7-Flash
      draftpair inspect ./GLM-4.7-Flash-4bit --drafter ./GLM-4.7-Flash-MTP-4bit --memory 24GB --require-fit
    """
    from draftpair.api import inspect
    from draftpair.report.text import inspect_text

    report = inspect(
        model, drafter, revision=revision, context=context, batch=batch, kv_bits=int(kv_bits), memory=memory
    )
    emit(report, as_json, inspect_text)
    malformed = any(finding["level"] == "error" for finding in report["integrity"]["findings"])
    no_head = require_head and not (report["head"]["present"] and report["head"]["complete"])
    no_fit = require_fit and not report["memory"]["fits"]
    if no_head:
        click.echo("error: --require-head: there is no whole head here", err=True)
    if no_fit:
        click.echo("error: --require-fit: the memory is not enough, or not known", err=True)
    return int(malformed or no_head or no_fit)
