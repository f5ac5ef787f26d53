"""stdout and stderr as every command finds them: they take any text, and a failure to write is told once.

A closed stream swallows what is written. On stdout a full disk is an error of the tool, and a reader that has
gone, as `head` goes, is `ReaderGone`; on stderr there is nobody left to tell.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import click

from draftpair.errors import ToolError


class ReaderGone(Exception):
    """Nobody reads stdout any more."""


def prepare() -> None:
    """Sets up both streams of this process; the work of a command does not depend on where they lead."""
    sys.stdout = _outlet(sys.stdout, _output_lost)
    sys.stderr = _outlet(sys.stderr, _message_lost)


def show(lines: Iterable[str], err: bool = False) -> None:
    """Lines of text, each on one line of the terminal whatever values are in it."""
    from draftpair.report.subjects import one_line

    for line in lines:
        click.echo(one_line(line), err=err)


class _File(io.FileIO):
    """A stream's file. The first write that fails is passed to `lost`; that one and all later ones vanish."""

    def __init__(self, fd: int, lost: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._lost: Callable[[OSError], None] | None = lost

    def write(self, data: Any) -> int:
        lost = self._lost
        if lost is not None:
            try:
                return super().write(data)
            except OSError as error:
                self._lost = None
                lost(error)
        return len(data)


def _outlet(stream: TextIO | None, lost: Callable[[OSError], None]) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    return io.TextIOWrapper(
        io.BufferedWriter(_File(stream.fileno(), lost)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty() or stream is sys.stderr,
    )


def _output_lost(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise ReaderGone from error
    raise ToolError(
        f"the report cannot be written: {error.strerror}",
        hint="what the command wrote to files is in place; only its output is lost",
    ) from error


def _message_lost(error: OSError) -> None:
    pass
