"""What several commands share: the options used twice, and how a report leaves the program."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from draftpair.cli._streams import ReaderGone, show

json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
revision_option = click.option("--revision", metavar="R", help="Branch, tag or commit of a Hub repository.")


_KIND_VARIABLES = ("LLAMA_ARG_DRAFT_KIND", "MLXCEL_DRAFT_KIND")


def asked_kind(option: str | None) -> str | None:
    """The draft kind that is asked for: by the option, else by the environment, where mlxcel reads it too."""
    return option or next((os.environ[name] for name in _KIND_VARIABLES if os.environ.get(name)), None)


def emit(
    report: Mapping[str, Any], as_json: bool, as_text: Callable[[Mapping[str, Any]], Iterable[str]]
) -> None:
    """The report on stdout, as JSON or as text. A reader that has gone does not change the answer."""
    with suppress(ReaderGone):
        if as_json:
            click.echo(json.dumps(report, indent=2))
        else:
            show(as_text(report))


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A function that shows bytes done of bytes in all on stderr, a bar a phase; None where nobody looks."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    bars: dict[str, tqdm[NoReturn]] = {}

    def show(phase: str, done: int, total: int) -> None:
        if phase not in bars:
            bars[phase] = tqdm(total=total, desc=phase, unit="B", unit_scale=True, leave=False)
        bars[phase].update(done - bars[phase].n)
        if done == total:
            bars[phase].close()  # what follows may have bars of its own

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
