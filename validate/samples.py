"""Reads small tensors whole and a few rows of large ones, in few reads and few bytes.

Neighbouring ranges of a file become one read: opening a file costs as much as tens of kilobytes of it, a request to
the Hub as much as a megabyte. Of a large tensor at most `ROWS` rows and `TENSOR_BYTES` are read, in `PLACES` runs of
rows spread from its first to its last row; of all large tensors of a checkpoint together `TOTAL_BYTES`, or one row of
each where that is more. From the Hub at most `REMOTE_READS` runs of rows are read, of tensors spread over them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.findings import Finding

SMALL_BYTES = 1 << 16
"""Up to this size a tensor is read whole, and a vector up to `TENSOR_BYTES`."""
ROWS, PLACES = 64, 8
TENSOR_BYTES, TOTAL_BYTES = 1 << 20, 16 << 20
REMOTE_READS = 64

_GAP, _REMOTE_GAP = 1 << 14, 1 << 20
_MOST_READS = 1024


class Span(NamedTuple):
    """Bytes `begin` to `end` of a tensor's data."""

    tensor: TensorInfo
    begin: int
    end: int


class Sample(NamedTuple):
    """What was read of a tensor: `rows` rows of `columns` elements of its dtype, one after the other in `data`.

    A vector is one row. `whole` says that this is all of it.
    """

    tensor: TensorInfo
    data: bytes
    rows: int
    whole: bool

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.tensor.shape[-1] if self.tensor.shape else 1


def is_remote(checkpoint: Checkpoint) -> bool:
    """Whether every read is a request."""
    return checkpoint.storage.folder is None


def to_be_read(checkpoint: Checkpoint, asked: bool | None) -> bool:
    """Whether weights are looked at: as ``asked``, and where nothing is asked those of this machine alone."""
    return not is_remote(checkpoint) if asked is None else asked


def unread(checkpoint: Checkpoint, asked: bool | None) -> list[Finding]:
    """That the weights of a repository on the Hub were not looked at, where nobody asked for that."""
    if asked is not None or not is_remote(checkpoint):
        return []
    return [
        Finding(
            "VALUES-NOT-READ",
            "note",
            f"{checkpoint.source} is on the Hub: headers and small files are read, and norms and other weights are not",
            where=checkpoint.source,
            hint="--values reads samples of them by range",
        )
    ]


def row_count(tensor: TensorInfo) -> int:
    """Rows of a tensor seen as a matrix: all its axes but the last."""
    return prod(tensor.shape[:-1])


def is_small(tensor: TensorInfo) -> bool:
    """Whether a tensor is read whole."""
    return tensor.nbytes <= (TENSOR_BYTES if len(tensor.shape) < 2 else SMALL_BYTES)


def read_samples(checkpoint: Checkpoint, tensors: Iterable[TensorInfo]) -> list[Sample]:
    """A sample of each tensor, in their order; from the Hub, of some of the large ones.

    A tensor without elements, and a vector larger than `TENSOR_BYTES`, gives none.
    """
    listed = [tensor for tensor in tensors if tensor.nbytes]
    large = [t for t in listed if not is_small(t) and len(t.shape) > 1]
    most = REMOTE_READS if is_remote(checkpoint) else _MOST_READS
    if is_remote(checkpoint):
        large = spread(large, most)
    places = min(PLACES, max(1, most // max(1, len(large))))
    share = min(TENSOR_BYTES, TOTAL_BYTES // max(1, len(large)))
    runs = {tensor.name: _runs(tensor, share, places) for tensor in large}
    taken = [t for t in listed if is_small(t) or t.name in runs]
    spans = [runs.get(t.name) or [Span(t, 0, t.nbytes)] for t in taken]
    data = iter(read_spans(checkpoint, [span for own in spans for span in own]))
    return [_sample(tensor, [next(data) for _ in own]) for tensor, own in zip(taken, spans, strict=True)]


def spread(items: Sequence[TensorInfo], most: int) -> list[TensorInfo]:
    """At most so many of them, evenly spaced, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[place * (len(items) - 1) // max(1, most - 1)] for place in range(most)]


def read_spans(checkpoint: Checkpoint, spans: Sequence[Span]) -> list[bytes]:
    """The bytes of each span, in their order. Those of a file that lie close together are read at once."""
    gap = _REMOTE_GAP if is_remote(checkpoint) else _GAP
    joined: list[TensorInfo] = []
    members: list[list[int]] = []
    for place in sorted(range(len(spans)), key=lambda place: _start(spans[place])):
        tensor, begin, end = spans[place]
        first, last = tensor.begin + begin, tensor.begin + end
        previous = joined[-1] if joined else None
        if previous is None or previous.file != tensor.file or first - previous.end > gap:
            joined.append(_stretch(tensor, first, last))
            members.append([place])
        else:
            joined[-1] = _stretch(tensor, previous.begin, max(previous.end, last))
            members[-1].append(place)
    found = [b""] * len(spans)
    every = checkpoint.read_each((stretch, 0, stretch.nbytes) for stretch in joined)
    for stretch, inside, data in zip(joined, members, every, strict=True):
        for place in inside:
            tensor, begin, end = spans[place]
            start = tensor.begin - stretch.begin
            found[place] = data[start + begin : start + end]
    return found


def _start(span: Span) -> tuple[str, int]:
    return span.tensor.file, span.tensor.begin + span.begin


def _stretch(tensor: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Bytes of the tensor's file, in the form that a checkpoint reads."""
    return TensorInfo(tensor.name, "U8", (end - begin,), tensor.file, begin, end)


def _runs(tensor: TensorInfo, share: int, places: int) -> list[Span]:
    """Runs of whole rows, at most `share` bytes of them but at least one row."""
    every = row_count(tensor)
    row = tensor.nbytes // every
    rows = max(1, min(ROWS, share // row, every))
    places = min(places, rows)
    each = rows // places
    starts = [(every - each) * place // max(1, places - 1) for place in range(places)]
    return [Span(tensor, start * row, (start + each) * row) for start in starts]


def _sample(tensor: TensorInfo, parts: list[bytes]) -> Sample:
    data = b"".join(parts)
    every = row_count(tensor)
    return Sample(tensor, data, len(data) * every // tensor.nbytes, len(data) == tensor.nbytes)
