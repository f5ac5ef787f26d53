"""The errors a user can meet: what was found, where, what was expected, and what to do next.

A bug is never one of these: only bad input, a missing file or a refused request is.
"""

from __future__ import annotations


class ToolError(Exception):
    """draftpair could not look, or will not go on; ``exit_code`` 3 unless a subclass says otherwise.

    ``message`` names the file or tensor; ``hint`` is the next thing to try, or None.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Refused(ToolError):
    """draftpair looked, and the answer is no: a malformed checkpoint, no head, an unsafe pair."""

    exit_code = 1


class Usage(ToolError):
    """The request itself is wrong: an option's value, or an output path that cannot be used."""

    exit_code = 2
