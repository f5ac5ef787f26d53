"""A key/value cache for sliding-window attention that can take rows back after the window has slid.

mlx-lm's ``RotatingKVCache`` overwrites the oldest row in place, so that a rejected row has already destroyed one that
is visible again after a rollback. This one keeps its rows in temporal order and drops old ones late.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

SLACK = 32
STEP = 256

Rows = tuple[mx.array, mx.array]


class WindowCache:
    """Keys and values of the last positions, each [B, heads, rows, width], by the protocol of mlx-lm's caches.

    A single query is given exactly the last ``window`` rows, its own included, and no mask. ``trim`` is exact to every
    one of the last ``slack`` offsets below the furthest that was reached, and over all of the last update, however
    many rows it had. No more than window + slack + max(STEP, rows of one update) rows are allocated.
    """

    def __init__(self, window: int, slack: int = SLACK) -> None:
        self.window, self.slack = window, slack
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self.held = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the rows of the next positions."""
        begin, end = self.held, self.held + keys.shape[2]
        if self.keys is None or self.values is None or end > self.keys.shape[2]:
            begin = min(self.held, self.window + self.slack)
            end = begin + keys.shape[2]
            self.keys = self._with_room(self.keys, keys, begin)
            self.values = self._with_room(self.values, values, begin)
        self.keys[..., begin:end, :] = keys
        self.values[..., begin:end, :] = values
        self.held = end
        self.offset += keys.shape[2]

    def visible(self, behind: int = 0) -> Rows:
        """What a query at the last position sees, or at the one ``behind`` positions before it."""
        return self._last(min(self.window, self.held - behind), behind)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Rows:
        """Add rows, and return what their queries see together: ``make_mask`` tells them apart."""
        before = min(self.offset, self.window - 1)
        self.append(keys, values)
        return self._last(before + keys.shape[2], 0)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for N queries, to be asked for before their rows are added."""
        window = min(window_size or self.window, self.window)
        before = min(self.offset, self.window - 1)
        if before + N > window or (return_array and N > 1):
            mask: mx.array = create_causal_mask(N, before, window_size=window)
            return mask
        return None if N == 1 else "causal"

    def trim(self, n: int) -> int:
        """Take back the last n rows, or as many as leave the window whole; returns how many."""
        dropped = self.offset > self.held
        n = min(n, max(0, self.held - self.window) if dropped else self.held)
        self.offset -= n
        self.held -= n
        return n

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return min(self.offset, self.window)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int, int]:
        return self.keys, self.values, self.offset, self.held

    @state.setter
    def state(self, value: Any) -> None:
        self.keys, self.values, self.offset, self.held = value

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def _last(self, count: int, behind: int) -> Rows:
        """``count`` rows, the last ``behind`` left out."""
        if self.keys is None or self.values is None:
            raise RuntimeError("rows of an empty cache were asked for")
        end = self.held - behind
        return self.keys[..., end - count : end, :], self.values[..., end - count : end, :]

    def _with_room(self, buffer: mx.array | None, new: mx.array, keep: int) -> mx.array:
        """The last ``keep`` rows of the buffer, and room behind them for the new ones."""
        batch, heads, rows, width = new.shape
        room = mx.zeros((batch, heads, max(STEP, rows), width), new.dtype)
        if buffer is None:
            return room
        return mx.concatenate([buffer[..., self.held - keep : self.held, :], room], axis=2)
