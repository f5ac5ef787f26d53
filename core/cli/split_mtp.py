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
@click.option("--q-bits", type=int, metavar="B", help="Quantize to B bits: affine has 2, 3, 4, 5, 6 and 8.")
@click.option(
    "--q-group-size", type=int, metavar="G", help="Columns that share a scale: affine has 32, 64 and 128."
)
@click.option(
    "--q-mode",
    type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]),
    help="Quantize in this mode; affine when only bits are given.",
)
@click.option(
    "--q-override",
    "q_overrides",
    multiple=True,
    metavar="PATTERN=WHAT",
    help="Quantize some modules otherwise: lm_head=8, 'mlp.*=mxfp4', eh_proj=none. The last that matches counts.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bfloat16", "float32"]),
    default="keep",
    show_default=True,
    help="Dtype of what is not quantized.",
)
@click.option(
    "--norms",
    type=click.Choice(["auto", "zero-centred", "shifted"]),
    default="auto",
    show_default=True,
    help="How the source stores norms that a family stores zero-centred, where the values do not tell.",
)
@click.option("--force", is_flag=True, help="Replace a drafter that is already there.")
@click.option("--dry-run", is_flag=True, help="Report what would be written, and write nothing.")
@click.option(
    "--upload-repo",
    metavar="ID",
    help="Upload the folder to this repository of the Hub, owner/name[@branch], if validate has nothing against it.",
)
@revision_option
@json_option
def command(
    model: str,
    output: str,
    block_size: int | None,
    q_bits: int | None,
    q_group_size: int | None,
    q_mode: str | None,
    q_overrides: tuple[str, ...],
    dtype: str,
    norms: str,
    force: bool,
    dry_run: bool,
    upload_repo: str | None,
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
            q_overrides=q_overrides,
            dtype=dtype,
            norms=norms,
            force=force,
            dry_run=dry_run,
            upload_repo=upload_repo,
            progress=progress,
        )
    emit(report, as_json, split_text)
