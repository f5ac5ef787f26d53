"""Writes one safetensors file: the header first, then every tensor's bytes at their place, in any order.

Promises: no symbolic link is followed and no existing file is touched; every byte of every tensor is
written exactly once, or `close` says which tensor is not whole; each piece is read back from the file, at the
place where the file's own header has it, and found equal before `write` returns; after `close` the bytes are
on disk. The same outputs and metadata always give the same header.

Reading back shows that whoever reads the file now gets these bytes. The system answers from memory, so it does
not show what the disk would give later: a disk that fails to store them is reported by the flush.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType

from draftpair.checkpoint.dtypes import ITEM_BITS, nbytes
from draftpair.checkpoint.header import read_header
from draftpair.errors import ToolError

Buffer = bytes | bytearray | memoryview

ALIGNMENT = 8
FLUSH_BYTES = 128 << 20
"""Bytes after which a flush is started while writing goes on, so that little is left to flush at the end."""

_READ_BACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Output:
    """A tensor to be written: `dtype` is a safetensors dtype such as `BF16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return nbytes(self.dtype, self.shape)


def encode_header(outputs: Sequence[Output], metadata: Mapping[str, str]) -> bytes:
    """The eight length bytes and the JSON of a safetensors header, padded to a multiple of eight bytes.

    Names are sorted. Data is laid out by falling element width, then by name, so that every tensor lies
    at a multiple of its element size, as the safetensors library does it. Raises ValueError for a name
    that occurs twice or cannot be a tensor's.
    """
    names = [output.name for output in outputs]
    if len(set(names)) != len(names) or "__metadata__" in names:
        raise ValueError("tensor names must be distinct, and none may be __metadata__")
    begin, places = 0, {}
    for output in sorted(outputs, key=lambda o: (-ITEM_BITS[o.dtype], o.name)):
        places[output.name] = [begin, begin + output.nbytes]
        begin += output.nbytes
    head: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    for o in sorted(outputs, key=lambda o: o.name):
        head[o.name] = {"dtype": o.dtype, "shape": list(o.shape), "data_offsets": places[o.name]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """One safetensors file being written; usable as a context manager and from several threads.

    Leaving the `with` block by an exception closes the file without checking it. Raises ToolError, here and in
    `write`, when the file does not give back what was written to it.
    """

    def __init__(self, path: Path, outputs: Sequence[Output], metadata: Mapping[str, str]) -> None:
        header = encode_header(outputs, metadata)
        self._path = path
        self._size = {o.name: o.nbytes for o in outputs}
        self._gaps = {o.name: [(0, o.nbytes)] if o.nbytes else [] for o in outputs}
        self._lock = Lock()
        self.size = len(header) + sum(self._size.values())
        flags = (
            os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        )
        self._fd = os.open(path, flags, 0o666)
        self._flusher = _Flusher(self._fd)
        with ExitStack() as undo:
            undo.callback(self.abandon)
            os.ftruncate(self._fd, self.size)
            _write_all(self._fd, memoryview(header), 0)
            self._begin = self._read_places(outputs)
            undo.pop_all()

    def _read_places(self, outputs: Sequence[Output]) -> dict[str, int]:
        """Where each tensor begins, by the header that is in the file now."""
        found = read_header(self._path).tensors
        wanted = {o.name: (o.dtype, o.shape) for o in outputs}
        if {name: (info.dtype, info.shape) for name, info in found.items()} != wanted:
            raise self._damaged("its header is another one")
        return {name: info.begin for name, info in found.items()}

    def write(self, name: str, offset: int, data: Buffer) -> None:
        """Puts `data` at byte `offset` of the tensor `name`, and reads it back.

        Raises ValueError when it passes the tensor's end or meets bytes already written.
        """
        view = memoryview(data).cast("B")
        self._claim(name, offset, offset + len(view))
        _write_all(self._fd, view, self._begin[name] + offset)
        for begin in range(0, len(view), _READ_BACK_BYTES):
            part = view[begin : begin + _READ_BACK_BYTES]
            # Python compares two `bytes` at once, and a memoryview with anything byte by byte.
            written = data if isinstance(data, bytes) and len(part) == len(data) else bytes(part)
            if os.pread(self._fd, len(part), self._begin[name] + offset + begin) != written:
                raise self._damaged(f"{name} reads back differently at bytes {offset + begin} and on")
        self._flusher.add(len(view))

    def _claim(self, name: str, begin: int, end: int) -> None:
        if begin == end:
            return
        with self._lock:
            gaps = self._gaps[name]
            for place, (low, high) in enumerate(gaps):
                if low <= begin and end <= high:
                    gaps[place : place + 1] = [(a, b) for a, b in ((low, begin), (end, high)) if a < b]
                    return
        raise ValueError(
            f"{name}: bytes {begin} to {end} are written already or pass the end ({self._size[name]} bytes)"
        )

    def _damaged(self, what: str) -> ToolError:
        return ToolError(
            f"{self._path.name} was not stored as it was written: {what}",
            hint="check the disk, and run again",
        )

    def close(self) -> None:
        """Flushes the file to disk and closes it.

        Raises ValueError, naming the tensor and its first gap, when a byte was never written.
        """
        if self._fd < 0:
            return
        try:
            for name, gaps in self._gaps.items():
                if gaps:
                    raise ValueError(f"{name}: bytes {gaps[0][0]} to {gaps[0][1]} were never written")
            self._flusher.finish()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file as it is."""
        if self._fd >= 0:
            self._flusher.stop()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class _Flusher:
    """Flushes a file while it is being written, on a thread of its own: the disk works from the start."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pool = ThreadPoolExecutor(1)
        self._lock = Lock()
        self._unflushed = 0
        self._flush: Future[None] | None = None

    def add(self, count: int) -> None:
        """Counts bytes that were written. Raises the OSError of a flush that failed."""
        with self._lock:
            self._unflushed += count
            if self._unflushed >= FLUSH_BYTES and (self._flush is None or self._flush.done()):
                self._join()
                self._flush = self._pool.submit(os.fsync, self._fd)
                self._unflushed = 0

    def finish(self) -> None:
        """Flushes what is left. The system tells of a failure once, so an earlier flush is asked for its own."""
        self._join()
        os.fsync(self._fd)

    def stop(self) -> None:
        """Waits for a flush that is under way."""
        self._pool.shutdown()

    def _join(self) -> None:
        if self._flush is not None:
            self._flush.result()


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
