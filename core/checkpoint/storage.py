"""Where a checkpoint's files lie: in a folder here, or in a repository on the Hub at one commit.

Only files directly in the folder, or at the top of the repository, count. Reading is safe in threads.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from draftpair.checkpoint.header import read_prefix
from draftpair.checkpoint.source import HubName
from draftpair.checkpoint.wording import printable
from draftpair.errors import ToolError

State = tuple[int, int, int]
"""Inode, size and time of change of a file; of a file at a commit, which never changes, only the size."""

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Storage(Protocol):
    """What a checkpoint needs to know of its files. Every method raises ToolError when it cannot look."""

    @property
    def place(self) -> str:
        """The folder or the repository as messages name it."""

    @property
    def folder(self) -> Path | None:
        """The folder that holds all files, None when there is none on this machine."""

    @property
    def hub_name(self) -> HubName | None:
        """What was asked of the Hub when files are read from there, else None."""

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes of files that came over the network so far; None for files on this machine."""

    def names(self) -> list[str]:
        """The plain files there are, sorted; links are followed."""

    def has(self, name: str) -> bool:
        """Whether there is a plain file of that name."""

    def path(self, name: str) -> Path | None:
        """Where a file lies on this machine, None when it is read from the Hub."""

    def shown(self, name: str) -> str:
        """A file as messages name it: with its place, so that a message about a pair says whose it is."""

    def state(self, name: str) -> State:
        """What changes when a file changes, to be compared later; the second number is its size."""

    def prefix(self, name: str) -> tuple[bytes, int]:
        """A weight file's first bytes, its whole header if that has a possible length, and the file's size."""

    def read(self, name: str, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes `begin` to `end` of a file, fewer where it ends sooner, and the size that it has now."""

    def read_whole(self, name: str, limit: int | None = None) -> bytes:
        """A whole small file, or its first `limit` bytes."""

    def each(self, work: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
        """What `work`, which reads, makes of each item, in order; several are read at once where that is faster."""

    def is_same_as(self, other: Storage) -> bool:
        """Whether both are one place, however it was named."""


@dataclass(frozen=True)
class Folder:
    """The files of a folder on this machine; nothing is held open."""

    root: Path

    @property
    def place(self) -> str:
        return shown_path(self.root)

    @property
    def folder(self) -> Path:
        return self.root

    @property
    def hub_name(self) -> None:
        return None

    @property
    def bytes_fetched(self) -> None:
        return None

    def names(self) -> list[str]:
        return [name for name in list_folder(self.root) if self.has(name)]

    def has(self, name: str) -> bool:
        return os.path.isfile(self.root / name)

    def path(self, name: str) -> Path:
        return self.root / name

    def shown(self, name: str) -> str:
        return shown_path(self.root / name)

    def state(self, name: str) -> State:
        try:
            found = os.stat(self.root / name)
        except OSError as error:
            raise ToolError(f"{self.shown(name)} cannot be examined: {error.strerror}") from error
        # Nobody can set the time of change, as that of modification can be.
        return found.st_ino, found.st_size, found.st_ctime_ns

    def prefix(self, name: str) -> tuple[bytes, int]:
        try:
            return read_prefix(self.root / name)
        except OSError as error:
            raise unreadable(self.root / name, error) from error

    def read(self, name: str, begin: int, end: int) -> tuple[bytes, int]:
        try:
            with _plain(self.root / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(begin)
                return file.read(end - begin), size
        except OSError as error:
            raise unreadable(self.root / name, error) from error

    def read_whole(self, name: str, limit: int | None = None) -> bytes:
        try:
            with _plain(self.root / name).open("rb") as file:
                return file.read(-1 if limit is None else limit)
        except OSError as error:
            raise unreadable(self.root / name, error) from error

    def each(self, work: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
        return map(work, items)

    def is_same_as(self, other: Storage) -> bool:
        return other.folder is not None and self.root.samefile(other.folder)


def _plain(path: Path) -> Path:
    """The path of a file that is to be opened; OSError for one that has become a pipe, which would be waited for."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no plain file")
    return path


def list_folder(root: Path) -> list[str]:
    """The names in a folder, sorted; ToolError when it cannot be listed, or what it holds cannot be looked at."""
    try:
        names = sorted(os.listdir(root))
        os.stat(os.path.join(root, os.curdir))  # may the folder be entered as well
    except OSError as error:
        raise unreadable(root, error) from error
    return names


def unreadable(path: Path, error: OSError) -> ToolError:
    """The error for a file or folder that the system does not let us read."""
    return ToolError(f"{shown_path(path)} cannot be read: {error.strerror or error}")


def shown_path(path: Path) -> str:
    """A path as messages name it: whole, on one line."""
    return printable(str(path), 1000)
