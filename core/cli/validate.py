"""``draftpair validate``: one checkpoint alone, or a target and its drafter together."""

from __future__ import annotations

import click

from draftpair.cli._common import emit, json_option

_EXIT = {"sound": 0, "proven": 0, "compatible": 0, "doubtful": 0, "unsafe": 1, "unknown": 3}


@click.command("validate")
@click.argument("target")
@click.argument("drafter", required=False)
@click.option(
    "--draft-block-size", type=int, metavar="N", help="Block width to check instead of the drafter's own."
)
@click.option("--strict", is_flag=True, help="Exit 1 for a doubtful verdict, too.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@json_option
def command(
    target: str, drafter: str | None, draft_block_size: int | None, strict: bool, form: str, as_json: bool
) -> int:
    """Whether a checkpoint is sound, or a target and a drafter are safe to run together.

    Nothing is loaded: headers, configs and tokenizers are read and compared.

    \b
    Exit codes: 0 sound, proven, compatible or (unless --strict) doubtful; 1 unsafe; 3 unknown.

    \b
    Examples:
      draftpair validate ./GLM-4.7-Flash-4bit ./GLM-4.7-Flash-MTP-4bit
      draftpair validate ./GLM-4.7-Flash-MTP-4bit --json
    """
    from draftpair.api import validate
    from draftpair.report.text import validate_text

    report = validate(target, drafter, draft_block_size=draft_block_size)
    emit(report, as_json or form == "json", validate_text)
    return 1 if strict and report["verdict"] == "doubtful" else _EXIT[report["verdict"]]
