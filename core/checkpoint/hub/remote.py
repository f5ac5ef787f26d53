"""A repository on the Hub at one commit, read by HTTP range as if it were a folder.

Promises: what is read is what the commit holds, or an error says why not. Every answer must state the size that
the list of files gave, and the ETag that the file had before. A connection that breaks is taken up at the byte
where it broke, a few times; waiting follows the server's `Retry-After` up to a minute. Files of the commit that
are in the local cache are read from there.

A server that ignores ranges sends files from their start: what is not wanted is read and thrown away when that is
little, and refused when it is much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

from draftpair.checkpoint.hub.cache import find_snapshot
from draftpair.checkpoint.hub.client import Answer, Hub, HubError, Listing
from draftpair.checkpoint.hub.workers import Patience, Stopped, at_once, persist, stop_of_thread
from draftpair.checkpoint.source import HubName
from draftpair.checkpoint.storage import Folder, State, Storage
from draftpair.checkpoint.strict_json import MAX_JSON_BYTES
from draftpair.checkpoint.wording import printable
from draftpair.errors import ToolError

MAX_WHOLE_BYTES = MAX_JSON_BYTES
"""Largest file that is read whole from the Hub; tokenizers, the largest of them, have tens of megabytes."""

TRIES = 5
READERS = 8

# Without a network every command would wait for this.
_LIST_TRIES = 3
_FIRST_READ = 64 * 1024
_LENGTH_BYTES = 8
# What is read and thrown away at most to get at a range that the server did not take notice of.
_MAX_DISCARDED = 16 << 20
_OTHER_ETAG = "its ETag is no longer the one that it had"
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Changed(ToolError):
    """A file on the Hub is not the one that was listed, or not the one that was read before."""


class Shelf(Protocol):
    """Bytes of the repository's files that are on this machine already."""

    def read(self, name: str, begin: int, end: int) -> bytes | None:
        """Bytes `begin` to `end` of a file, None when they are not all here."""


def open_repository(name: HubName) -> tuple[Storage, str]:
    """The files of a repository and its commit: in the cache when all of them are there, else on the Hub."""
    hub = Hub()
    listing = persist(lambda: hub.list_files(name), _LIST_TRIES)
    found = find_snapshot(HubName(name.repository, listing.commit))
    repository = Repository(hub, listing, found[0] if found else None)
    return (Folder(found[0]) if found and repository.is_cached else repository), listing.commit


class Repository:
    """The files of a repository at the commit of its listing; `Storage` says what the methods do."""

    def __init__(self, hub: Hub, listing: Listing, snapshot: Path | None) -> None:
        self._hub = hub
        self._listing = listing
        self._cached: dict[str, Folder] = {}
        if snapshot is not None:
            cache = Folder(snapshot)
            here = (name for name in cache.names() if name in listing.files)
            self._cached = {n: cache for n in here if cache.state(n)[1] == listing.files[n]}
        self._etags: dict[str, str] = {}
        self._locations: dict[str, tuple[str, str | None]] = {}
        self._whole: dict[str, bytes] = {}
        self._shelf: Shelf | None = None
        self._fetched = 0
        self._lock = Lock()

    @property
    def place(self) -> str:
        return f"{self._listing.name.repository}@{self._listing.commit}"

    @property
    def folder(self) -> None:
        return None

    @property
    def hub_name(self) -> HubName:
        return self._listing.name

    @property
    def bytes_fetched(self) -> int:
        """Every byte that a server sent of a file, what was thrown away and what came twice included."""
        return self._fetched

    @property
    def commit(self) -> str:
        """The commit that is read."""
        return self._listing.commit

    @property
    def is_cached(self) -> bool:
        """Whether every file is in the local cache."""
        return self._cached.keys() == self._listing.files.keys()

    def names(self) -> list[str]:
        return sorted(self._listing.files)

    def has(self, name: str) -> bool:
        return name in self._listing.files

    def path(self, name: str) -> Path | None:
        return self._cached[name].path(name) if name in self._cached else None

    def shown(self, name: str) -> str:
        return f"{self.place}/{printable(name)}"

    def state(self, name: str) -> State:
        return self._cached[name].state(name) if name in self._cached else (0, self._size(name), 0)

    def prefix(self, name: str) -> tuple[bytes, int]:
        if name in self._cached:
            return self._cached[name].prefix(name)
        prefix, size = self.read(name, 0, _FIRST_READ)
        wanted = _LENGTH_BYTES + int.from_bytes(prefix[:_LENGTH_BYTES], "little")
        if len(prefix) < wanted <= min(size, MAX_JSON_BYTES + _LENGTH_BYTES):
            prefix += self.read(name, len(prefix), wanted)[0]
        return prefix, size

    def read(self, name: str, begin: int, end: int) -> tuple[bytes, int]:
        if name in self._cached:
            return self._cached[name].read(name, begin, end)
        size = self._size(name)
        begin, end = min(begin, size), min(end, size)
        here = self._shelf.read(name, begin, end) if self._shelf else None
        if here is not None:
            return here, size
        data = bytearray()
        self.download(name, begin, end, data.extend)
        return bytes(data), size

    def read_whole(self, name: str, limit: int | None = None) -> bytes:
        if name in self._cached:
            return self._cached[name].read_whole(name, limit)
        size = self._size(name)
        if limit is not None and limit < size:
            return self.read(name, 0, limit)[0]
        if size > MAX_WHOLE_BYTES:
            raise ToolError(
                f"{self.shown(name)} has {size:,} bytes; at most {MAX_WHOLE_BYTES:,} are read whole from the Hub",
                f"Download the repository: {self.hub_name.download}",
            )
        if name not in self._whole:
            self._whole[name] = self.read(name, 0, size)[0]
        return self._whole[name]

    def each(self, work: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
        return at_once(work, items, READERS)

    def is_same_as(self, other: Storage) -> bool:
        return isinstance(other, Repository) and self.place == other.place

    def is_remote(self, name: str) -> bool:
        """Whether a file has to be fetched: it is not in the cache."""
        return name not in self._cached

    def etag(self, name: str) -> str | None:
        """The ETag that a file had when it was last read, None before."""
        return self._etags.get(name)

    def expect(self, name: str, etag: str) -> None:
        """Raise Changed when the ETag of a file is another, or turns out to be when the file is read."""
        if self._etags.setdefault(name, etag) != etag:
            raise self._changed(name, _OTHER_ETAG)

    def use(self, shelf: Shelf | None) -> None:
        """Look for bytes on `shelf` before the Hub is asked."""
        self._shelf = shelf

    def download(self, name: str, begin: int, end: int, take: Callable[[bytes], object]) -> None:
        """Give bytes `begin` to `end` of a file to `take`, in order and each one once.

        Raises Changed when the file is another than before, another ToolError when the Hub cannot give them.
        """
        patience, stop = Patience(TRIES), stop_of_thread()
        while begin < end:
            try:
                with closing(self._chunks(name, begin, end)) as chunks:
                    for chunk in chunks:
                        if stop.is_set():
                            raise Stopped
                        take(chunk)
                        begin += len(chunk)
                        patience.renew()
                if begin < end:
                    raise HubError(f"{self.shown(name)} ended {end - begin:,} bytes too early", again=True)
            except HubError as error:
                self._locations.pop(name, None)
                patience.after(error)

    def _chunks(self, name: str, begin: int, end: int) -> Generator[bytes, None, None]:
        known = self._locations.get(name)
        url = known[0] if known else self._hub.url(self.hub_name, self.commit, name)
        with self._hub.get(url, begin, end, self.hub_name, name) as answer:
            surplus = self._surplus(name, answer, begin, end)
            self._check_identity(name, answer, known)
            left = end - begin
            for chunk in answer.chunks:
                with self._lock:
                    self._fetched += len(chunk)
                wanted = chunk[surplus : surplus + left]
                surplus -= min(surplus, len(chunk))
                left -= len(wanted)
                if wanted:
                    yield wanted
                if not left:
                    break

    def _surplus(self, name: str, answer: Answer, begin: int, end: int) -> int:
        """How many bytes come before the range; refused when the answer is no part of the file that is meant."""
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise HubError(f"{self._hub.host} sends {self.shown(name)} compressed, which was not asked for")
        if answer.status == 200:
            self._check_size(name, answer.headers.get("content-length"))
            if end > _MAX_DISCARDED:
                raise HubError(
                    f"the server ignores the range that was asked for and sends {self.shown(name)} from its start "
                    f"({self._size(name):,} bytes)",
                    f"Download the repository: {self.hub_name.download}",
                )
            return begin
        stated = answer.headers.get("content-range", "")
        found = _CONTENT_RANGE.fullmatch(stated)
        if answer.status != 206 or not found or int(found[1]) != begin or not begin <= int(found[2]) < end:
            got = f"status {answer.status}, Content-Range {printable(stated)!r}"
            raise HubError(
                f"bytes {begin}-{end - 1} of {self.shown(name)} were asked for, the answer is {got}"
            )
        self._check_size(name, found[3])
        return 0

    def _check_size(self, name: str, stated: str | None) -> None:
        if stated is not None and stated.strip() != str(self._size(name)):
            listed = f"the Hub lists it with {self._size(name):,} bytes, and now it has {printable(stated)}"
            raise self._changed(name, listed)

    def _check_identity(self, name: str, answer: Answer, known: tuple[str, str | None] | None) -> None:
        """Hold an answer against those before it, and remember the storage host that the Hub redirected to."""
        if answer.commit not in (None, self.commit):
            raise self._changed(name, f"the answer is of commit {printable(str(answer.commit))}")
        with self._lock:
            if known is not None:
                same = answer.etag == known[1]
            else:
                etag = answer.linked_etag or answer.etag
                same = etag is None or self._etags.setdefault(name, etag) == etag
                if self._hub.is_elsewhere(answer.url):
                    self._locations[name] = (answer.url, answer.etag)
        if not same:
            raise self._changed(name, _OTHER_ETAG)

    def _changed(self, name: str, how: str) -> Changed:
        return Changed(
            f"{self.shown(name)} changed while it was being read: {how}",
            "Nothing at a commit should change: run again, or look at what HF_ENDPOINT points to.",
        )

    def _size(self, name: str) -> int:
        return self._listing.files[name]
