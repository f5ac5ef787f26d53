"""Fetched pieces of a repository's files on this disk, each at its place in a sparse file of its own.

A spool outlives the run that fills it, so that an interrupted one can go on. Its journal names the pieces that are
whole, each with its SHA-256; a piece that does not match, as after a power cut, counts as not fetched. One run uses
a spool at a time: another run at the same commit gets the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

from draftpair.errors import ToolError

try:
    import fcntl
except ImportError:  # not on Windows, where two runs at one commit must not meet
    fcntl = None  # type: ignore[assignment]

Span = tuple[int, int]
"""Begin and end of a range of bytes in a file."""

_MAX_SPOOLS = 16
_JOURNAL = "journal"
_CHUNK = 1 << 20


def merged(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """The spans in order, those that touch or lie at most `gap` bytes apart as one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def without(spans: Iterable[Span], taken: Sequence[Span]) -> Iterator[Span]:
    """What is left of each span outside of `taken`, which is merged."""
    for begin, end in spans:
        for low, high in taken:
            if high > begin and low < end:
                if low > begin:
                    yield begin, low
                begin = min(high, end)
        if begin < end:
            yield begin, end


def pieces(spans: Iterable[Span], size: int) -> Iterator[Span]:
    """The spans cut into pieces of at most `size` bytes."""
    for begin, end in spans:
        for start in range(begin, end, size):
            yield start, min(start + size, end)


class Spool:
    """One spool, locked for this process; safe in threads. ToolError when the disk does not play along."""

    def __init__(self, folder: Path, journal: int) -> None:
        self.folder = folder
        self.etags: dict[str, str] = {}
        self._journal = journal
        self._files: dict[str, int] = {}
        self._whole: dict[str, list[Span]] = {}
        self._lock = Lock()

    def load(self, sizes: Mapping[str, int]) -> None:
        """Take over what an earlier run fetched of the files with these sizes."""
        with _told(self.folder):
            lines = (self.folder / _JOURNAL).read_bytes().splitlines()
            for entry in filter(None, map(_parsed, lines)):
                name, size, begin, end, digest, etag = entry
                if sizes.get(name) == size and begin < end <= size and self._hash(name, begin, end) == digest:
                    self._add(name, (begin, end))
                    if etag is not None:
                        self.etags.setdefault(name, etag)

    def missing(self, name: str, spans: Iterable[Span]) -> list[Span]:
        """The parts of the spans that have not been fetched."""
        return list(without(spans, self._whole.get(name, ())))

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Put bytes at their place; they count when `finish` has named their piece."""
        with _told(self._path(name)):
            file, view = self._open(name), memoryview(data)
            while view:
                count = os.pwrite(file, view, offset)
                view, offset = view[count:], offset + count

    def finish(self, name: str, span: Span, digest: str, size: int, etag: str | None) -> None:
        """Count a piece as fetched, in this run and in later ones; `digest` is the SHA-256 of its bytes."""
        entry = {"file": name, "size": size, "begin": span[0], "end": span[1], "sha256": digest, "etag": etag}
        with self._lock, _told(self.folder):
            os.write(self._journal, json.dumps(entry).encode() + b"\n")
            self._add(name, span)

    def read(self, name: str, begin: int, end: int) -> bytes | None:
        """Bytes `begin` to `end` of a file, None when they have not all been fetched."""
        whole = self._whole.get(name, [])
        place = bisect_right(whole, (begin, float("inf"))) - 1
        if place < 0 or whole[place][1] < end:
            return None
        with _told(self._path(name)):
            data = b"".join(self._stored(name, begin, end))
        return data if len(data) == end - begin else None

    def require_space(self, needed: int) -> None:
        """ToolError when the disk has less free than `needed` bytes."""
        with _told(self.folder):
            free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ToolError(
                f"{needed:,} bytes have to be fetched, and the disk of {self.folder} has {free:,} free",
                "Make room, or set HF_ASSETS_CACHE to a folder on another disk.",
            )

    @property
    def is_empty(self) -> bool:
        """Whether no piece is whole."""
        return not self._whole

    def close(self) -> None:
        """Leave the spool to a later run."""
        for file in (*self._files.values(), self._journal):
            os.close(file)
        self._files.clear()

    def discard(self) -> None:
        """Remove the spool, and the folders around it as far as they are empty then."""
        with suppress(OSError):
            # The journal, which carries the lock, goes last.
            for path in sorted(self.folder.iterdir(), key=lambda path: path.name == _JOURNAL):
                path.unlink()
            for folder in (self.folder, *self.folder.parents[:2]):
                folder.rmdir()
        self.close()

    def _add(self, name: str, span: Span) -> None:
        # A new list each time, so that a reader in another thread always sees a whole one.
        self._whole[name] = merged([*self._whole.get(name, ()), span])

    def _hash(self, name: str, begin: int, end: int) -> str:
        digest = hashlib.sha256()
        for chunk in self._stored(name, begin, end):
            digest.update(chunk)
        return digest.hexdigest()

    def _stored(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        file = self._open(name)
        while begin < end and (chunk := os.pread(file, min(_CHUNK, end - begin), begin)):
            yield chunk
            begin += len(chunk)

    def _open(self, name: str) -> int:
        with self._lock:
            if name not in self._files:
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
                self._files[name] = os.open(self._path(name), flags, 0o666)
            return self._files[name]

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.part"


def open_spool(parent: Path, sizes: Mapping[str, int]) -> Spool:
    """A spool in `parent` that no other run uses, with what an earlier run left in it, or else a new one."""
    numbers = [str(number) for number in range(_MAX_SPOOLS)]
    for number in sorted(numbers, key=lambda number: not os.path.isdir(parent / number)):
        folder = parent / number
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            journal = _locked(folder / _JOURNAL)
        if journal is not None:
            spool = Spool(folder, journal)
            spool.load(sizes)
            return spool
    raise ToolError(
        f"{_MAX_SPOOLS} other runs are fetching into {parent}", "Wait until one of them ends, and run again."
    )


def _locked(path: Path) -> int | None:
    """The file, open for appending and locked; None when another run has it, or is just removing it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    with ExitStack() as undo:
        try:
            file = os.open(path, flags, 0o666)
            undo.callback(os.close, file)
            _lock(file)
            there = os.stat(path)
        except (FileNotFoundError, BlockingIOError):
            return None
        if not os.path.samestat(there, os.fstat(file)):
            return None
        undo.pop_all()
        return file


def _lock(file: int) -> None:
    """Lock a file; BlockingIOError when another process has. Where there are no locks, none is taken."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


def _parsed(line: bytes) -> tuple[str, int, int, int, str, str | None] | None:
    """An entry of the journal; None for a line that was cut short, or that is none."""
    try:
        entry = json.loads(line)
        name, size, begin, end = entry["file"], entry["size"], entry["begin"], entry["end"]
        digest, etag = entry["sha256"], entry["etag"]
    except (ValueError, TypeError, LookupError):
        return None
    texts, numbers = (name, digest, "" if etag is None else etag), (size, begin, end)
    valid = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in numbers)
    return (name, size, begin, end, digest, etag) if valid else None


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ToolError(
            f"{path}, where fetched bytes are kept, cannot be used: {error.strerror or error}",
            "Make room, or set HF_ASSETS_CACHE to a folder that you may write to.",
        ) from error
