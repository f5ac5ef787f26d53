"""``draftpair validate``: one checkpoint alone, a target and its drafter together, or a list of pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, BinaryIO, TextIO

import click

from draftpair.checkpoint.strict_json import MAX_JSON_BYTES, JSONProblem, parse_json
from draftpair.cli._common import asked_kind
from draftpair.cli._reports import emit_reports, format_options, strict_option
from draftpair.cli._streams import ReaderGone
from draftpair.errors import Usage


@click.command("validate")
@click.argument("target", required=False)
@click.argument("drafter", required=False)
@click.option(
    "--draft-kind", metavar="KIND", help="The kind the drafter is to be run as: it has to be of that kind."
)
@click.option(
    "--draft-block-size", type=int, metavar="N", help="Block width to check instead of the drafter's own."
)
@click.option(
    "--values/--no-values",
    default=None,
    help="Whether to look at norms and samples of other weights [default: on this machine, not on the Hub].",
)
@click.option(
    "--pairs",
    type=click.File(encoding="utf-8", errors="surrogateescape"),  # a line in another encoding stops no other
    metavar="FILE",
    help="A list of pairs, one JSON object a line; - is standard input.",
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Processes for --pairs [default: all processors]."
)
@click.option(
    "--facts",
    type=click.File("rb"),
    metavar="FILE",
    help="Judge a pair-facts document; - is standard input.",
)
@strict_option
@format_options
def command(
    target: str | None,
    drafter: str | None,
    draft_kind: str | None,
    draft_block_size: int | None,
    values: bool | None,
    pairs: TextIO | None,
    jobs: int | None,
    facts: BinaryIO | None,
    strict: bool,
    form: str,
    as_json: bool,
) -> int:
    """Whether a checkpoint is sound, or a target and a drafter are safe to run together.

    Nothing is loaded: headers, configs, tokenizers and small tensors are read and compared. TARGET given twice means
    the head in its own files.

    \b
    Exit codes: 0 sound, proven, compatible or (unless --strict) doubtful; 1 unsafe; 3 unknown. Of several pairs
    the gravest counts: 1, then 3, then 2 for a line that cannot be understood.

    \b
    Examples:
      draftpair validate ./GLM-4.7-Flash-4bit ./GLM-4.7-Flash-MTP-4bit
      draftpair validate Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16 --format github
      echo '{"target": "./target", "drafter": "./drafter"}' | draftpair validate --pairs -
    """
    from draftpair import api

    if sum(given is not None for given in (target, pairs, facts)) != 1:
        raise click.UsageError("give TARGET, or --pairs, or --facts")
    if pairs is not None:
        why = "does not go with --pairs: every line is JSON, and says what it asks for"
        _refuse(why, "draft_kind", "draft_block_size", "as_json", "form")
        return _each_line(api.validate_pairs(pairs, values=values, jobs=jobs), strict)
    _refuse("goes with --pairs alone", "jobs")
    if facts is not None:
        why = "does not go with --facts: the document says all that is judged"
        _refuse(why, "draft_kind", "draft_block_size", "values")
        report = api.judge_facts(_document(facts))
    else:
        if drafter is None:
            _refuse("is asked of a DRAFTER, and none is given", "draft_kind", "draft_block_size")
        report = api.validate(
            str(target),
            drafter,
            draft_block_size=draft_block_size,
            draft_kind=asked_kind(draft_kind) if drafter else None,
            values=values,
        )
    return emit_reports([report], "json" if as_json else form, strict)


def _each_line(results: Iterable[dict[str, Any]], strict: bool) -> int:
    """Prints every result as soon as it is there; gives the exit code that they come to."""
    codes = set()
    with suppress(ReaderGone):
        for result in results:
            doubtful = result["report"] is not None and result["report"]["verdict"] == "doubtful"
            codes.add(1 if strict and doubtful else result["exit_code"])
            click.echo(json.dumps(result))
    return next((code for code in (1, 3, 2) if code in codes), 0)


def _refuse(why: str, *names: str) -> None:
    """Raises UsageError for the first of these parameters that was given: it would say nothing here."""
    context = click.get_current_context()
    given = [
        name for name in names if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        option = next(p.opts[0] for p in context.command.params if p.name == given[0])
        raise click.UsageError(f"{option} {why}")


def _document(file: BinaryIO) -> Any:
    try:
        parsed = parse_json(file.read(MAX_JSON_BYTES + 1))
    except JSONProblem as problem:
        raise Usage(f"what --facts names is no JSON: {problem}") from None
    if parsed.repeated:
        raise Usage(f"what --facts names is ambiguous: {parsed.repeated[0]}", hint="give each key once")
    return parsed.value
