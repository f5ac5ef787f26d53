"""Text of token ids as they come: whole characters only, and none of a stop string.

Each step decodes the ids since the last finished piece, and holds text back while it ends in the middle of a
character. It uses the tokenizer's own ``decode`` and nothing else, so ids without a token do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a decoder puts for bytes that are no character, or not yet one.
_UNFINISHED = "\ufffd"

# A character begins with up to three bytes that are none yet. Ids before those can only be bytes that never will be.
_BEGINNING = 3
_HELD = 8


class TextStream:
    """The text of the ids added so far is what ``add`` and, at the end, ``finish`` returned, joined.

    It is the same however the ids are grouped.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        # Decoding starts at `_start`, so that the ids from there to `_told`, whose text is out, give context:
        # some decoders join words, or drop a leading blank, by what comes before.
        self._start = self._told = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that is now complete."""
        return "".join(map(self._next, ids))

    def _next(self, token: int) -> str:
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(_UNFINISHED):
            return self._hopeless() if len(self._ids) - self._told > _HELD else ""
        self._tell(text)
        return text

    def _hopeless(self) -> str:
        """The text of held ids but for the last few, cut where decoding both parts gives what decoding all does."""
        before = self._decode(self._ids[self._start : self._told]) if self._told > self._start else ""
        whole = self._decode(self._ids[self._start :])
        last = len(self._ids) - _BEGINNING
        for cut in range(last, max(self._told, last - _HELD), -1):
            head: str = self._decode(self._ids[self._start : cut])
            if head + self._decode(self._ids[cut:]) == whole:
                self._start, self._told = self._told, cut
                return head[len(before) :]
        return ""

    def finish(self) -> str:
        """The rest, bytes that make no character shown as the decoder shows them."""
        text = self._new_text()
        self._tell(text)
        return text

    def _tell(self, text: str) -> None:
        if text:  # ids without text would be a context in which the next word has none before it
            self._start = self._told
        self._told = len(self._ids)

    def _new_text(self) -> str:
        if self._told == len(self._ids):
            return ""
        before = self._decode(self._ids[self._start : self._told]) if self._told > self._start else ""
        text: str = self._decode(self._ids[self._start :])
        return text[len(before) :]


class StopStrings:
    """Cuts a text that comes in pieces: what ``add`` and, at the end, ``finish`` returned, joined, is the text before
    the first stop string in it, or all of it.

    The first is the one that ends first, and of those that end at the same character the longest: so the cut does not
    depend on how the text was pieced. ``found`` says whether there was one; what is added after it is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` are not empty texts."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that is now known to be before every stop string."""
        if self.found:
            return ""
        text = self._held + piece
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        self.found = bool(places)
        sure = min(places)[1] if places else len(text) - self._begun(text)
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """What was held back because it could have begun a stop string."""
        rest = "" if self.found else self._held
        self._held = ""
        return rest

    def _begun(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        sizes = range(min(len(text), self._longest - 1), 0, -1)
        return next((size for size in sizes if self._begins(text[-size:])), 0)

    def _begins(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
