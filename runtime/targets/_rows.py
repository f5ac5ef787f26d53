"""Attention of a verify block row by row: every query by itself, over the keys that it alone would have been given.

A kernel picked for another number of rows, or for another layout, may round differently; so each row is contiguous,
stands at its own position, and needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from draftpair.runtime.window import Rows


def rotated(rope: Callable[[mx.array, int], mx.array], heads: mx.array, start: int) -> list[mx.array]:
    """[1, heads, K, d] -> K arrays [1, heads, 1, d], turned by ``rope`` to the positions from ``start`` on."""
    rows = range(heads.shape[2])
    return [rope(mx.contiguous(heads[:, :, row : row + 1]), start + row) for row in rows]


def up_to_each(resident: Rows, count: int) -> list[Rows]:
    """What each of the last ``count`` positions sees of keys and values [1, heads, T, d]: itself and all before it."""
    keys, values = resident
    ends = range(keys.shape[2] - count + 1, keys.shape[2] + 1)
    return [(keys[:, :, :end], values[:, :, :end]) for end in ends]


def attended(queries: Sequence[mx.array], seen: Sequence[Rows], scale: float) -> mx.array:
    """Each query [1, heads, 1, d] over its own keys and values: [1, K, heads * d]."""
    rows = [
        mx.fast.scaled_dot_product_attention(query, keys, values, scale=scale, mask=None)
        for query, (keys, values) in zip(queries, seen, strict=True)
    ]
    return mx.concatenate(rows, axis=2).transpose(0, 2, 1, 3).reshape(1, len(rows), -1)
