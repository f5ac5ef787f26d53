"""How a report, or several, leave the program in the format that was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import click

from draftpair.cli._common import json_option
from draftpair.cli._streams import ReaderGone
from draftpair.report import Report, exit_code, formats, render

_Command = TypeVar("_Command", bound=Callable[..., object])


def format_options(command: _Command) -> _Command:
    """``--format`` and ``--json``, its short form: parameters ``form`` and ``as_json``."""
    choice = click.Choice(formats())
    option = click.option("--format", "form", type=choice, default="text", show_default=True)
    return option(json_option(command))


def strict_option(command: _Command) -> _Command:
    """``--strict``: parameter ``strict``."""
    return click.option("--strict", is_flag=True, help="Exit 1 for a doubtful verdict, too.")(command)


def emit_reports(reports: Iterable[Report], form: str, strict: bool = False) -> int:
    """The reports on stdout, for GitHub the job's summary too; gives the exit code that they come to."""
    several = list(reports)
    with suppress(ReaderGone):
        click.echo(render(several, form, strict=strict))
    if form == "github":
        _append_summary(several)
    return exit_code(several, strict)


def _append_summary(reports: list[Report]) -> None:
    """Adds to the file that the runner names, if it does; the answer does not depend on that."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    from draftpair.report.github import summary

    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(summary(reports))
    except OSError as error:
        click.echo(f"warning: the job's summary cannot be written: {error.strerror}", err=True)
