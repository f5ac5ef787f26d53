"""``draftpair check``: single files of a checkpoint, as a commit hook hands them over."""

from __future__ import annotations

from pathlib import Path

import click

from draftpair.cli._reports import emit_reports, format_options, strict_option


@click.command("check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@strict_option
@format_options
def command(files: tuple[str, ...], strict: bool, form: str, as_json: bool) -> int:
    """Whether an index or a config.json is sound, as far as it can be told without the weights.

    FILE is a *.safetensors.index.json, which is held against the weight files beside it, or a config.json. Weight
    files that are not there, or are Git LFS pointers, are a note.

    \b
    Exit codes: 0 sound or (unless --strict) doubtful; 1 unsafe; 2 a file of another kind; 3 cannot be told.

    \b
    Examples:
      draftpair check GLM-4.7-Flash/model.safetensors.index.json
      draftpair check */config.json --format github
    """
    from draftpair.report import envelope
    from draftpair.validate.files import check_files

    report = envelope("check", {"files": list(files)}, check_files([Path(file) for file in files]))
    return emit_reports([report], "json" if as_json else form, strict)
