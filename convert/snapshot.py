"""Notices that a source file changed between the plan and the end of the run.

Of files on the Hub there is nothing to notice here: each answer is held against the commit when it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.storage import State
from draftpair.errors import Refused

Snapshot = Mapping[str, State]


def snapshot(checkpoint: Checkpoint, files: Collection[str]) -> Snapshot:
    """Inode, size and time of change of the named files of the source.

    Raises Refused when a weight file's size is not the one its header was read with, ToolError when a file is gone.
    """
    state: dict[str, State] = {}
    for name in sorted(files):
        state[name] = checkpoint.storage.state(name)
        now, opened = state[name][1], checkpoint.files.get(name)
        if opened and now != opened.size:
            raise _changed(name, f"{opened.size} bytes then, {now} now")
    return state


def refuse_changes(checkpoint: Checkpoint, before: Snapshot, linked: bool = False) -> None:
    """Raises Refused, naming the file, when a file is no longer what it was at `before`.

    With `linked` the run made links of the files, which changes their time of change: they must be the same files.
    """
    compared = slice(2 if linked else None)
    for name, now in snapshot(checkpoint, before).items():
        if now[compared] != before[name][compared]:
            raise _changed(name, "another size, time or inode")


def _changed(name: str, how: str) -> Refused:
    return Refused(
        f"{name} in the source changed while it was being read ({how})",
        hint="wait until nothing writes to the source (a download, a conversion), and run again",
    )
