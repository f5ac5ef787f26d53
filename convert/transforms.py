"""What may happen to a tensor's rows on the way from head to drafter, by the names the records use.

A tensor is seen as a matrix whose rows are its last axis. Each transform turns the rows of the sources of one
output tensor into that tensor's rows, in order, in pieces no larger than asked (one row, or one attention head,
at least). Values are moved and never computed with, so every dtype passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from draftpair.checkpoint.dtypes import ITEM_BITS
from draftpair.checkpoint.stored import Stored

ReadRows = Callable[[Stored, int, int], bytes]
"""Rows `begin` to `end` of a stored tensor, in its `dtype`."""


class Piece(NamedTuple):
    """Some rows of an output tensor, still in the dtype of `source`, which they come from."""

    source: Stored
    data: bytes


class Place(NamedTuple):
    """Which output of its rule a tensor is, and its shape."""

    part: int
    shape: tuple[int, ...]


Transform = Callable[[ReadRows, Sequence[Stored], Place, int], Iterator[Piece]]


def copy(read: ReadRows, sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """The one source as it is."""
    return stack(read, sources, place, limit)


def stack(read: ReadRows, sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """The sources in their order on a new first axis: expert e becomes `output[e]`."""
    for source in sources:
        yield from _pieces(read, source, 0, source.rows, limit)


def join_rows(read: ReadRows, sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """The rows of the first source, then those of the next: two projections of one input made into one."""
    return stack(read, sources, place, limit)


def halve_rows(read: ReadRows, sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """One half of the rows of each matrix: part 0 the first (gate), part 1 the second (up).

    The source is `[..., 2 * rows, columns]`; the leading axes, of experts, stay.
    """
    (source,) = sources
    rows = place.shape[-2]
    for matrix in range(source.rows // (2 * rows) if rows else 0):
        begin = (2 * matrix + place.part) * rows
        yield from _pieces(read, source, begin, begin + rows, limit)


def deinterleave_rows(read: ReadRows, sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """Every second row: part 0 the even ones (gate), part 1 the odd ones (up), for matrices whose rows take turns."""
    (source,) = sources
    row = source.columns * ITEM_BITS[source.dtype] // 8
    step, pairs = max(1, limit // (2 * row)) if row else 1, source.rows // 2 if row else 0
    for first in range(0, pairs, step):
        last = min(first + step, pairs)
        taken = np.frombuffer(read(source, 2 * first, 2 * last), np.uint8).reshape(-1, 2, row)
        yield Piece(source, taken[:, place.part].tobytes())


def split_kv_b(read: ReadRows, sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """Takes the joined key-value up-projection of multi-head latent attention apart.

    The source is `[heads * (nope + value), rank]`; each head's first `nope` rows make keys, the
    others values. Part 0 is `embed_q [heads, rank, nope]`, the key rows transposed, so that a query can
    be moved into the latent space; part 1 is `unembed_out [heads, value, rank]`, the value rows.
    With it attention runs on the latent cache (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """
    (source,) = sources
    heads, first, second = place.shape
    wanted = second if place.part == 0 else first
    rows = source.rows // heads
    item = np.dtype(f"u{ITEM_BITS[source.dtype] // 8}")
    skipped = 0 if place.part == 0 else rows - wanted
    for head in range(heads):
        begin = head * rows + skipped
        data = read(source, begin, begin + wanted)
        if place.part == 0:
            data = np.frombuffer(data, item).reshape(wanted, source.columns).T.tobytes()
        yield Piece(source, data)


def drop(read: ReadRows, sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """Nothing: the tensor is not carried over."""
    return iter(())


TRANSFORMS: dict[str, Transform] = {
    f.__name__: f for f in (copy, stack, join_rows, halve_rows, deinterleave_rows, split_kv_b, drop)
}

KEEPS_ROWS = frozenset({"copy", "stack", "join_rows", "halve_rows", "deinterleave_rows"})
"""Transforms whose output rows are rows of a source, so that packed rows pass through them as they are."""


def _pieces(read: ReadRows, source: Stored, begin: int, end: int, limit: int) -> Iterator[Piece]:
    row = source.columns * ITEM_BITS[source.dtype] // 8
    step = max(1, limit // row) if row else end - begin
    for first in range(begin, end, step) if row else ():
        yield Piece(source, read(source, first, min(first + step, end)))
