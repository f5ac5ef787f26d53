"""What may happen to a tensor's values on the way from head to drafter, by the names the records use.

Each transform turns the sources of one output tensor into that tensor's bytes, in order, in pieces that
are whole rows and no larger than asked (one row, or one attention head, at least). Bytes are moved and
never interpreted, so every 16- and 32-bit dtype passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from draftpair.checkpoint import TensorInfo
from draftpair.checkpoint.dtypes import ITEM_BITS

Read = Callable[[TensorInfo, int, int], bytes]


class Piece(NamedTuple):
    """Some bytes of an output tensor, still in the dtype of `source`, which they come from."""

    source: TensorInfo
    data: bytes


class Place(NamedTuple):
    """Which output of its rule a tensor is, and its shape."""

    part: int
    shape: tuple[int, ...]


Transform = Callable[[Read, Sequence[TensorInfo], Place, int], Iterator[Piece]]


def copy(read: Read, sources: Sequence[TensorInfo], place: Place, limit: int) -> Iterator[Piece]:
    """The one source as it is."""
    return stack(read, sources, place, limit)


def stack(read: Read, sources: Sequence[TensorInfo], place: Place, limit: int) -> Iterator[Piece]:
    """The sources in their order on a new first axis: expert e becomes `output[e]`."""
    for source in sources:
        size = source.end - source.begin
        row = (source.shape[-1] if source.shape else 1) * ITEM_BITS[source.dtype] // 8
        step = _step(row if len(source.shape) > 1 else ITEM_BITS[source.dtype] // 8, limit)
        for begin in range(0, size, step):
            yield Piece(source, read(source, begin, min(begin + step, size)))


def split_kv_b(read: Read, sources: Sequence[TensorInfo], place: Place, limit: int) -> Iterator[Piece]:
    """Takes the joined key-value up-projection of multi-head latent attention apart.

    The source is `[heads * (nope + value), rank]`; each head's first `nope` rows make keys, the
    others values. Part 0 is `embed_q [heads, rank, nope]`, the key rows transposed, so that a query can
    be moved into the latent space; part 1 is `unembed_out [heads, value, rank]`, the value rows.
    With it attention runs on the latent cache (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """
    (source,) = sources
    heads, first, second = place.shape
    rank = source.shape[1]
    wanted = second if place.part == 0 else first
    rows = source.shape[0] // heads
    item = np.dtype(f"u{ITEM_BITS[source.dtype] // 8}")
    row_bytes = rank * item.itemsize
    skipped = 0 if place.part == 0 else rows - wanted
    for head in range(heads):
        begin = (head * rows + skipped) * row_bytes
        data = read(source, begin, begin + wanted * row_bytes)
        if place.part == 0:
            data = np.frombuffer(data, item).reshape(wanted, rank).T.tobytes()
        yield Piece(source, data)


def drop(read: Read, sources: Sequence[TensorInfo], place: Place, limit: int) -> Iterator[Piece]:
    """Nothing: the tensor is not carried over."""
    return iter(())


TRANSFORMS: dict[str, Transform] = {f.__name__: f for f in (copy, stack, split_kv_b, drop)}


def _step(unit: int, limit: int) -> int:
    """The largest multiple of `unit` bytes within `limit`, at least one unit."""
    return max(unit, limit // unit * unit) if unit else limit
