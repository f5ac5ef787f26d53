"""What the user meant by a model's name: a path here, or a repository on the Hub.

A misspelt folder must never turn into a repository: whatever looks like a path is one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from draftpair.checkpoint.wording import printable
from draftpair.errors import Usage

_SCHEME = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")


@dataclass(frozen=True)
class HubName:
    """A repository on the Hub; `revision` is a branch, tag or commit, None for the default branch."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that brings all of its files into the local cache."""
        return f"hf download {self.repository}" + (f" --revision {self.revision}" if self.revision else "")


def parse_source(source: str | Path, revision: str | None = None) -> Path | HubName:
    """Tell a path from a Hub name; Usage for what is neither, or for a revision that does not fit.

    A path is a `Path`, anything that exists, and anything with a leading `.`, `/` or `~` or more than one
    `/`; so is every text that could not be a Hub name. `hf://` always means the Hub.
    """
    if isinstance(source, str) and source.startswith(_SCHEME):
        return _hub_name(source[len(_SCHEME) :], source, revision)
    text = str(source)
    if not text or "\0" in text:
        raise Usage(
            f"{printable(text)!r} is no path and no Hub name", "Give a folder, a file, or owner/name."
        )
    path = Path(os.path.expanduser(text))
    if isinstance(source, Path) or _looks_like_path(text) or _may_exist(path):
        if revision is not None:
            raise Usage(
                f"a revision was given, but {text} is a path", "Revisions belong to owner/name on the Hub."
            )
        return path
    return _hub_name(text, text, revision)


def _may_exist(path: Path) -> bool:
    """Whether something is there, or the system does not let us see whether it is."""
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") != 1 or _split(text) is None


def _hub_name(text: str, source: str, revision: str | None) -> HubName:
    name = _split(text)
    if name is None:
        raise Usage(
            f"{printable(source)} is no Hub name", "Write hf://owner/name or hf://owner/name@revision."
        )
    if revision is not None and name.revision not in (None, revision):
        raise Usage(f"{printable(source)} and --revision {printable(revision)} ask for different revisions")
    if revision is not None and not _valid_revision(revision):
        raise Usage(f"{printable(revision)!r} is no revision", "Give a branch, a tag or a commit.")
    return HubName(name.repository, name.revision or revision)


def _split(text: str) -> HubName | None:
    """`owner/name` or `owner/name@revision`, None when the text has neither form."""
    repository, at, revision = text.partition("@")
    valid = _REPOSITORY.fullmatch(repository) and "--" not in repository and ".." not in repository
    if not valid or (at and not _valid_revision(revision)):
        return None
    return HubName(repository, revision or None)


def _valid_revision(revision: str) -> bool:
    return _REVISION.fullmatch(revision) is not None and ".." not in revision
