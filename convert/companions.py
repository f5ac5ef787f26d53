"""The files that go with the weights: tokenizer, chat template, generation defaults, licence.

They are copied as they are, from the source folder or from the Hub. A symbolic link in the source is followed only
to a file of the source folder or of the Hub cache it belongs to: a downloaded folder must not be able to name any
file of this machine.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.storage import unreadable
from draftpair.errors import ToolError
from draftpair.findings import Finding

WANTED = ("tokenizer.json", "tokenizer_config.json")
NAMES = (
    *WANTED,
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)
_LICENCES = ("LICENSE", "LICENCE", "NOTICE")
_CHUNK = 1 << 18
_HUB_CHUNK = 4 << 20


@dataclass(frozen=True)
class Companion:
    """A file to copy: its name in both folders, its size, and the real path it is read from, None on the Hub."""

    name: str
    nbytes: int
    path: Path | None
    checkpoint: Checkpoint


def is_companion(name: str) -> bool:
    """Whether a file of this name is one that a split copies."""
    return name in NAMES or (name.isprintable() and name.upper().startswith(_LICENCES))


def find_companions(checkpoint: Checkpoint) -> tuple[list[Companion], list[Finding]]:
    """The companions the source has, sorted by name, and what is to be said about the others."""
    companions: list[Companion] = []
    outside: list[str] = []
    for name in filter(is_companion, checkpoint.storage.names()):
        here = checkpoint.storage.path(name)
        path = Path(os.path.realpath(here)) if here else None
        if here and leads_out(here):
            outside.append(name)
        else:
            companions.append(Companion(name, checkpoint.storage.state(name)[1], path, checkpoint))
    return companions, [*_outside(outside), *_absent({c.name for c in companions} | set(outside))]


def leads_out(path: Path) -> bool:
    """Whether a file is a link to one that is neither in its folder nor in the Hub cache this belongs to."""
    return Path(os.path.realpath(path)).parent not in _homes(path.parent)


def copy_companion(companion: Companion, folder: Path) -> str:
    """Copies one file into `folder` and returns the SHA-256 of what was written, in hexadecimal."""
    digest = hashlib.sha256()
    with open(folder / companion.name, "xb") as copy:
        for chunk in _content(companion):
            digest.update(chunk)
            copy.write(chunk)
    return digest.hexdigest()


def _content(companion: Companion) -> Iterator[bytes]:
    if companion.path is None:
        for begin in range(0, companion.nbytes, _HUB_CHUNK):
            yield companion.checkpoint.storage.read(companion.name, begin, begin + _HUB_CHUNK)[0]
        return
    # Neither a link is followed nor a pipe waited for that took the file's place since the plan.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        fd = os.open(companion.path, flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ToolError(f"{companion.path} is no longer a plain file")
            while chunk := os.read(fd, _CHUNK):
                yield chunk
        finally:
            os.close(fd)
    except OSError as error:
        raise unreadable(companion.path, error) from error


def _homes(root: Path) -> tuple[Path, ...]:
    """Folders whose files may be copied: the source, and the blobs of the Hub cache it lies in."""
    real = Path(os.path.realpath(root))
    return (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)


def _absent(present: Iterable[str]) -> Iterable[Finding]:
    for name in WANTED:
        if name not in present:
            yield Finding(
                "SPLIT-COMPANION-MISSING",
                "warning",
                f"the source has no {name}; the drafter is written without it",
                where=name,
                hint=f"a runtime that needs it must take it from the target; or add {name} to the source",
            )


def _outside(names: Iterable[str]) -> Iterable[Finding]:
    for name in names:
        yield Finding(
            "SPLIT-COMPANION-OUTSIDE",
            "warning",
            f"{name} is a symbolic link that leads out of the source folder; it was not copied",
            where=name,
            hint="replace the link by the file if you trust it",
        )
