"""Notices that a source file changed between the plan and the end of the run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Refused, ToolError

Snapshot = Mapping[str, tuple[int, int, int]]


def snapshot(checkpoint: Checkpoint, files: Collection[str]) -> Snapshot:
    """Inode, size and time of change of the named files of the source.

    Raises Refused when a file's size is not the one its header was read with, ToolError when it is gone.
    """
    state: dict[str, tuple[int, int, int]] = {}
    for name in sorted(files):
        try:
            found = os.stat(checkpoint.root / name)
        except OSError as error:
            raise ToolError(f"{checkpoint.root / name} cannot be examined: {error.strerror}") from error
        if found.st_size != checkpoint.files[name].size:
            raise _changed(name, f"{checkpoint.files[name].size} bytes then, {found.st_size} now")
        state[name] = (found.st_ino, found.st_size, found.st_mtime_ns)
    return state


def refuse_changes(checkpoint: Checkpoint, before: Snapshot) -> None:
    """Raises Refused, naming the file, when a file is no longer what it was at `before`."""
    for name, now in snapshot(checkpoint, before).items():
        if now != before[name]:
            raise _changed(name, "another size, time or inode")


def _changed(name: str, how: str) -> Refused:
    return Refused(
        f"{name} in the source changed while it was being read ({how})",
        hint="wait until nothing writes to the source (a download, a conversion), and run again",
    )
