"""``draftpair split-mtp``: the head of a raw checkpoint, as a drafter folder of its own."""

from __future__ import annotations

import click

from draftpair.cli._common import emit, json_option, progress_bars, revision_option


@click.command("split-mtp")
@click.option("-m", "--model", required=True, metavar="MODEL", help="The raw checkpoint that holds the head.")
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder to write.")
@click.option(
    "--block-size", type=int, metavar="N", help="Block width to record, 2 to 16; it counts the bonus token."
)
@click.option("--q-bits", type=int, metavar="B", help="Quantize to 2, 3, 4, 5, 6 or 8 bits.")
@click.option(
    "--q-group-size",
    type=int,
    default=64,
    show_default=True,
    metavar="G",
    help="Columns that share a scale: 32, 64 or 128.",
)
@click.option(
    "--q-mode", default="affine", show_default=True, metavar="MODE", help="The one mode written yet."
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bfloat16", "float32"]),
    default="keep",
    show_default=True,
    help="Dtype of what is not quantized.",
)
@click.option("--force", is_flag=True, help="Replace a drafter that is already there.")
@click.option("--dry-run", is_flag=True, help="Report what would be written, and write nothing.")
@revision_option
@json_option
def command(
    model: str,
    output: str,
    block_size: int | None,
    q_bits: int | None,
    q_group_size: int,
    q_mode: str,
    dtype: str,
    force: bool,
    dry_run: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Cut the MTP head out of a raw checkpoint into a drafter folder.

    Everything is checked before the first byte is written, and the folder appears whole or not at all.

    \b
    Examples:
      draftpair split-mtp --model ./GLM-4.7-Flash --output ./GLM-4.7-Flash-MTP-4bit --q-bits 4
      draftpair split-mtp --model ./GLM-4.7-Flash --output ./GLM-4.7-Flash-MTP-bf16 --dry-run --json
    """
    from draftpair.api import split_mtp
    from draftpair.report.text import split_text

    with progress_bars(quiet=as_json) as progress:
        report = split_mtp(
            model,
            output,
            revision=revision,
            block_size=block_size,
            q_bits=q_bits,
            q_group_size=q_group_size,
            q_mode=q_mode,
            dtype=dtype,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    emit(report, as_json, split_text)
