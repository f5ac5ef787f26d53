"""Fetches tensors from the Hub before they are used: exactly their bytes, on a few connections at once.

What is read of the tensors afterwards comes from this disk. An interrupted run keeps what it has, and the next one
at the same commit fetches the rest; when the work is done nothing is left behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from draftpair.checkpoint.checkpoint import Checkpoint
from draftpair.checkpoint.header import TensorInfo
from draftpair.checkpoint.hub.cache import spool_folder
from draftpair.checkpoint.hub.remote import Changed, Repository
from draftpair.checkpoint.hub.spool import Span, Spool, merged, open_spool, pieces
from draftpair.checkpoint.hub.workers import at_once
from draftpair.errors import Refused, ToolError

STAGE = "fetch"
PIECE_BYTES = 8 << 20
CONNECTIONS = 4
MAX_GAP = 256 * 1024
"""Bytes between two tensors that are fetched along with them, because a request of their own would cost more."""

Progress = Callable[[str, int, int], None]


@contextmanager
def fetch_ranges(
    checkpoint: Checkpoint, tensors: Iterable[TensorInfo], progress: Progress | None = None
) -> Iterator[None]:
    """Inside of the block, what is read of `tensors` is on this disk; nothing happens for a checkpoint that is.

    `progress` is called with "fetch", the bytes that are here and the bytes to be had, from several threads, never
    two at once. ToolError when the Hub cannot give the bytes or the disk cannot hold them; what was fetched is kept
    then, and also when the block fails, unless by a refusal, which another run would repeat.
    """
    storage = checkpoint.storage
    spans = _wanted(storage, tensors) if isinstance(storage, Repository) else {}
    if not isinstance(storage, Repository) or not spans:
        yield
        return
    sizes = {name: storage.state(name)[1] for name in spans}
    spool = open_spool(spool_folder(storage.hub_name, storage.commit), sizes)
    keep = True
    try:
        _fill(spool, storage, spans, progress)
        storage.use(spool)
        yield
        keep = False
    except (Refused, Changed):
        keep = False
        raise
    finally:
        storage.use(None)
        if keep and not spool.is_empty:
            spool.close()
        else:
            spool.discard()


def _wanted(storage: Repository, tensors: Iterable[TensorInfo]) -> dict[str, list[Span]]:
    """File -> the spans to fetch of it, in order."""
    spans: dict[str, list[Span]] = {}
    for tensor in tensors:
        if tensor.nbytes and storage.is_remote(tensor.file):
            spans.setdefault(tensor.file, []).append((tensor.begin, tensor.end))
    return {name: merged(found, MAX_GAP) for name, found in sorted(spans.items())}


def _fill(
    spool: Spool, storage: Repository, spans: Mapping[str, list[Span]], progress: Progress | None
) -> None:
    missing = {name: spool.missing(name, wanted) for name, wanted in spans.items()}
    total, left = (sum(end - begin for group in s.values() for begin, end in group) for s in (spans, missing))
    spool.require_space(left)
    for name, etag in spool.etags.items():
        storage.expect(name, etag)
    lock, done = Lock(), total - left

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress:
                progress(STAGE, done, total)

    def fetch(piece: tuple[str, Span]) -> None:
        name, span = piece
        digest, offset = hashlib.sha256(), span[0]

        def take(chunk: bytes) -> None:
            nonlocal offset
            spool.write(name, offset, chunk)
            digest.update(chunk)
            offset += len(chunk)
            advance(len(chunk))

        storage.download(name, *span, take)
        spool.finish(name, span, digest.hexdigest(), storage.state(name)[1], storage.etag(name))

    advance(0)
    work = [(name, span) for name, group in missing.items() for span in pieces(group, PIECE_BYTES)]
    try:
        for _ in at_once(fetch, work, CONNECTIONS):
            pass
    except Changed:
        raise
    except ToolError as error:
        if spool.is_empty:
            raise
        kept = f"What was fetched is kept in {spool.folder}; run again to go on from there."
        error.hint = f"{error.hint} {kept}" if error.hint else kept
        raise
