"""``draftpair generate``: a target alone, or with its drafter."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from draftpair.cli._common import emit, json_option
from draftpair.cli._generation import drafting_of, options_of, pair_options, sampling_options
from draftpair.cli._streams import show


@click.command("generate")
@pair_options
@click.option("-p", "--prompt", required=True, metavar="TEXT", help="The text to go on from.")
@sampling_options
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="The text ends before this; can be given several times."
)
@click.option("--profile", is_flag=True, help="Add the seconds of each phase and the acceptance by position.")
@json_option
def command(prompt: str, profile: bool, as_json: bool, **params: Any) -> int:
    """Run a target, alone or with its drafter.

    The pair is validated before anything is loaded. With the same seed the tokens are the same with and without
    the drafter. The text goes to stdout, the figures to stderr. Ctrl-C ends the text, and the figures so far follow.

    \b
    Examples:
      draftpair generate --model ./GLM-4.7-Flash-4bit --draft-model ./GLM-4.7-Flash-MTP-4bit \\
        --prompt "Why is the sky blue?" --temp 0
      draftpair generate --model ./Qwen3-8B-4bit --prompt-lookup --prompt "Repeat: a b c d e f g" --stop "g"
    """
    from draftpair.api import generate
    from draftpair.runtime.options import Interrupted, is_on

    try:
        with _screen() as show_piece:
            report = generate(
                params["model"],
                prompt,
                **drafting_of(params),
                options=options_of(params),
                on_text=(lambda piece: None) if as_json else show_piece,
                on_ids=_print_ids if is_on(os.environ.get("MLXCEL_PRINT_TOKEN_IDS")) else None,
            )
    except Interrupted as stop:
        _tell(stop.report, as_json, profile)
        click.echo("interrupted", err=True)
        return 130
    _tell(report, as_json, profile)
    return 0


class _Screen:
    """Shows text on stdout, each piece whole: a Ctrl-C meanwhile counts after it, unless there is a second one."""

    def __init__(self) -> None:
        self._writing = self._asked = False

    def __call__(self, piece: str) -> None:
        self._writing = True
        click.echo(piece, nl=False)
        self._writing = False
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._writing and not self._asked:
            self._asked = True
        else:
            raise KeyboardInterrupt


@contextmanager
def _screen() -> Iterator[_Screen]:
    """A screen that gets Ctrl-C, if Python's own handler would have got it."""
    screen, before = _Screen(), signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not in_main:
        yield screen
        return
    signal.signal(signal.SIGINT, screen.interrupt)
    try:
        yield screen
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(report: Mapping[str, Any], as_json: bool, profile: bool) -> None:
    from draftpair.report.text import generate_text, profile_text

    emit(report, as_json, lambda report: [""])  # the text is there already, but for the end of its line
    if not as_json:
        show([*generate_text(report), *(profile_text(report) if profile else ())], err=True)


def _print_ids(what: str, ids: Sequence[int]) -> None:
    click.echo(f"{what} ids: {list(ids)}", err=True)
