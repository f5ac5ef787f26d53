"""What may happen to a tensor's rows on the way from head to drafter, by the names the records use.

A tensor is seen as a matrix whose rows are its last axis. Each transform says which rows of the sources become the
rows of one output tensor, in order, in pieces no larger than asked (one row, or one attention head, at least).
Nothing is read here, so that several threads can fetch pieces of one tensor. Values are moved and never computed
with, so every dtype passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from draftpair.checkpoint.dtypes import ITEM_BITS
from draftpair.checkpoint.stored import Stored

Rearrange = Callable[[bytes], bytes]


class Piece(NamedTuple):
    """Rows `begin` to `end` of `source`, which become `values` values of the output, rearranged if need be."""

    source: Stored
    begin: int
    end: int
    values: int
    rearrange: Rearrange | None = None


class Place(NamedTuple):
    """Which output of its rule a tensor is, and its shape."""

    part: int
    shape: tuple[int, ...]


Transform = Callable[[Sequence[Stored], Place, int], Iterator[Piece]]


def copy(sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """The one source as it is."""
    return stack(sources, place, limit)


def stack(sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """The sources in their order on a new first axis: expert e becomes `output[e]`."""
    for source in sources:
        yield from _pieces(source, 0, source.rows, limit)


def join_rows(sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """The rows of the first source, then those of the next: two projections of one input made into one."""
    return stack(sources, place, limit)


def halve_rows(sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """One half of the rows of each matrix: part 0 the first (gate), part 1 the second (up).

    The source is `[..., 2 * rows, columns]`; the leading axes, of experts, stay.
    """
    (source,) = sources
    rows = place.shape[-2]
    for matrix in range(source.rows // (2 * rows) if rows else 0):
        begin = (2 * matrix + place.part) * rows
        yield from _pieces(source, begin, begin + rows, limit)


def deinterleave_rows(sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """Every second row: part 0 the even ones (gate), part 1 the odd ones (up), for matrices whose rows take turns."""
    (source,) = sources
    row = source.columns * ITEM_BITS[source.dtype] // 8
    step, pairs = max(1, limit // (2 * row)) if row else 1, source.rows // 2 if row else 0

    def every_second(data: bytes) -> bytes:
        return np.frombuffer(data, np.uint8).reshape(-1, 2, row)[:, place.part].tobytes()

    for first in range(0, pairs, step):
        last = min(first + step, pairs)
        yield Piece(source, 2 * first, 2 * last, (last - first) * source.columns, every_second)


def split_kv_b(sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
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

    def transposed(data: bytes) -> bytes:
        return np.frombuffer(data, item).reshape(wanted, source.columns).T.tobytes()

    for head in range(heads):
        begin = head * rows + skipped
        values = wanted * source.columns
        yield Piece(source, begin, begin + wanted, values, None if place.part else transposed)


def drop(sources: Sequence[Stored], place: Place, limit: int) -> Iterator[Piece]:
    """Nothing: the tensor is not carried over."""
    return iter(())


TRANSFORMS: dict[str, Transform] = {
    f.__name__: f for f in (copy, stack, join_rows, halve_rows, deinterleave_rows, split_kv_b, drop)
}

KEEPS_ROWS = frozenset({"copy", "stack", "join_rows", "halve_rows", "deinterleave_rows"})
"""Transforms whose output rows are rows of a source, so that packed rows pass through them as they are."""


def _pieces(source: Stored, begin: int, end: int, limit: int) -> Iterator[Piece]:
    row = source.columns * ITEM_BITS[source.dtype] // 8
    step = max(1, limit // row) if row else end - begin
    for first in range(begin, end, step) if row else ():
        last = min(first + step, end)
        yield Piece(source, first, last, (last - first) * source.columns)
