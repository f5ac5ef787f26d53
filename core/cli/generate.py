"""``draftpair generate``: a target alone, or with its drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from draftpair.cli._common import asked_kind, emit, json_option
from draftpair.cli._streams import show


@click.command("generate")
@click.option("-m", "--model", required=True, metavar="TARGET", help="The target model.")
@click.option(
    "--draft-model", "--model-draft", metavar="DRAFTER", help="Its drafter; without one, plain decoding."
)
@click.option("--draft-kind", metavar="KIND", help="The kind the drafter must be of; default: what it is.")
@click.option(
    "--draft-block-size", type=int, metavar="N", help="Rows of a verify block, the bonus token included."
)
@click.option("-p", "--prompt", required=True, metavar="TEXT", help="The text to go on from.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temp", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="0 is off.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is off.")
@click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="0 is off.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed draws the same tokens.")
@click.option("--no-chat-template", is_flag=True, help="Take the prompt as it is.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto: float32 on the CPU, else the checkpoint's own.",
)
@click.option("--allow-doubtful", is_flag=True, help="Run a pair whose verdict is doubtful.")
@click.option("--profile", is_flag=True, help="Add the seconds of each phase and the acceptance by position.")
@json_option
def command(
    model: str,
    draft_model: str | None,
    draft_kind: str | None,
    draft_block_size: int | None,
    prompt: str,
    max_tokens: int,
    temp: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    no_chat_template: bool,
    dtype: str,
    allow_doubtful: bool,
    profile: bool,
    as_json: bool,
) -> None:
    """Run a target, alone or with its drafter.

    The pair is validated before anything is loaded. With the same seed the tokens are the same with and without
    the drafter. The text goes to stdout, the figures to stderr.

    \b
    Example:
      draftpair generate --model ./GLM-4.7-Flash-4bit --draft-model ./GLM-4.7-Flash-MTP-4bit \\
        --prompt "Why is the sky blue?" --temp 0
    """
    from draftpair.api import generate
    from draftpair.report.text import generate_text, profile_text
    from draftpair.runtime.options import Options, is_on

    if draft_model is not None:
        draft_kind = asked_kind(draft_kind)
    report = generate(
        model,
        prompt,
        draft_model,
        draft_kind=draft_kind,
        draft_block_size=draft_block_size,
        allow_doubtful=allow_doubtful,
        options=Options(max_tokens, temp, top_p, top_k, min_p, seed, dtype, not no_chat_template),
        on_text=(lambda piece: None) if as_json else (lambda piece: click.echo(piece, nl=False)),
        on_ids=_print_ids if is_on(os.environ.get("MLXCEL_PRINT_TOKEN_IDS")) else None,
    )
    emit(report, as_json, lambda report: [""])  # the text is there already, but for the end of its line
    if not as_json:
        show([*generate_text(report), *(profile_text(report) if profile else ())], err=True)


def _print_ids(what: str, ids: Sequence[int]) -> None:
    click.echo(f"{what} ids: {list(ids)}", err=True)
