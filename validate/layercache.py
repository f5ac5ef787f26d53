"""What one layer keeps between tokens, and how the memory for it grows.

A prompt is taken to be seen in one piece but for its last token, and that as a step of its own, as mlx-lm
generates; a prompt cut into odd pieces can make a cache that grows in steps one step longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftpair.validate.recurrent import LayerState

STEP = 256
QUANT_GROUP = 64

Growth = Literal["steps", "doubling", "rotating", "chunked", "exact"]
"""``steps``: by 256 tokens without end. ``doubling``: twice the prompt, from 256 tokens on. ``rotating``: the prompt,
then by 256, up to the window. ``chunked``: by 256, cut to the window before each step. ``exact``: the tokens there
are, up to the window."""


@dataclass(frozen=True)
class LayerCache:
    """Rows of (heads, elements) for each token, an optional window, a state that does not grow.

    ``group`` tokens share one row. ``open_elements`` are kept in float32 for each token of a group that is not
    complete. ``extra_bytes`` of each row are no elements: positions and flags. ``window`` is None for a cache that
    grows with the context.
    """

    name: str
    rows: tuple[tuple[int, int], ...] = ()
    window: int | None = None
    quantizable: bool = False
    state: LayerState | None = None
    growth: Growth = "steps"
    group: int = 1
    open_elements: int = 0
    extra_bytes: int = 0

    @property
    def elements(self) -> int:
        """Cached elements a row."""
        return sum(heads * width for heads, width in self.rows)

    def tokens(self, context: int) -> int:
        """Rows the cache has room for when ``context`` tokens were seen."""
        seen = context // self.group
        if self.growth == "exact":
            return seen if self.window is None else min(seen, self.window)
        if self.growth == "doubling":
            return _whole_steps(2 * (seen - 1)) if seen > STEP else STEP
        room = _whole_steps(seen)
        if self.window is None:
            return room
        if self.growth == "chunked":
            return self.window + STEP if seen - 1 > self.window else room
        # One token alone is put into a whole step; a longer prompt stays as it is until the next token.
        return min(seen - 1 + STEP if seen > 2 else STEP, self.window)

    def nbytes(self, context: int, kv_bits: int) -> int:
        """Bytes of one sequence without the state."""
        open_bytes = context % self.group * self.open_elements * 4
        return self.tokens(context) * self.row_bytes(kv_bits) + open_bytes

    def token_bytes(self, kv_bits: int) -> int:
        """What one more token costs once the window is full."""
        return 0 if self.window is not None else self.row_bytes(kv_bits) // self.group

    def row_bytes(self, kv_bits: int) -> int:
        """Bytes a row at ``kv_bits``, or at 16 bits where mlx-lm cannot quantize this cache."""
        if kv_bits >= 16 or not self.can_quantize():
            return self.elements * max(kv_bits, 16) // 8 + self.extra_bytes
        return sum(h * (w * kv_bits // 32 * 4 + w // QUANT_GROUP * 2 * 2) for h, w in self.rows)

    def can_quantize(self) -> bool:
        """Whether mlx-lm has a quantized form of this cache."""
        return self.quantizable and all(width % QUANT_GROUP == 0 for _, width in self.rows)


def _whole_steps(tokens: int) -> int:
    return -(-tokens // STEP) * STEP
