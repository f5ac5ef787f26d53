"""``draftpair attach``: a split head back into a target, as the embedded head it lost."""

from __future__ import annotations

import click

from draftpair.cli._common import emit, json_option, progress_bars, revision_option


@click.command("attach")
@click.option("-m", "--model", required=True, metavar="TARGET", help="The target that lost its head.")
@click.option("--drafter", required=True, metavar="DRAFTER", help="The folder that split-mtp wrote.")
@click.option(
    "-o", "--output", required=True, metavar="DIR", help="Folder to write; it must not exist or be empty."
)
@click.option("--link", is_flag=True, help="Hard-link the target's files instead of copying them.")
@click.option("--dry-run", is_flag=True, help="Report what would be written, and write nothing.")
@revision_option
@json_option
def command(
    model: str, drafter: str, output: str, link: bool, dry_run: bool, revision: str | None, as_json: bool
) -> None:
    """Put a split head back into a target that was converted or fine-tuned without it.

    The target's weight files stay as they are; the head gets a file of its own, and the index is written anew.

    \b
    Example:
      draftpair attach --model ./Qwen3.5-9B-mlx-4bit --drafter ./Qwen3.5-9B-MTP-bf16 --output ./Qwen3.5-9B-mlx-4bit-mtp
    """
    from draftpair.api import attach
    from draftpair.report.text import attach_text

    with progress_bars(quiet=as_json) as progress:
        report = attach(
            model, drafter, output, revision=revision, link=link, dry_run=dry_run, progress=progress
        )
    emit(report, as_json, attach_text)
