"""Text of token ids as they come, whole characters only.

Each step decodes the ids since the last finished piece, and holds text back while it ends in the middle of a
character. It uses the tokenizer's own ``decode`` and nothing else, so ids without a token do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a decoder puts for bytes that are no character, or not yet one.
_UNFINISHED = "\ufffd"


class TextStream:
    """The text of the ids added so far is what ``add`` and, at the end, ``finish`` returned, joined."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        # Decoding starts at `_start`, so that the ids from there to `_told`, whose text is out, give context:
        # some decoders join words, or drop a leading blank, by what comes before.
        self._start = self._told = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that is now complete."""
        self._ids += ids
        text = self._new_text()
        if text.endswith(_UNFINISHED):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return text

    def finish(self) -> str:
        """The rest, bytes that make no character shown as the decoder shows them."""
        text = self._new_text()
        self._start = self._told = len(self._ids)
        return text

    def _new_text(self) -> str:
        if self._told == len(self._ids):
            return ""
        before = self._decode(self._ids[self._start : self._told]) if self._told > self._start else ""
        text: str = self._decode(self._ids[self._start :])
        return text[len(before) :]
