"""How messages of this package put lists and byte counts: short, and the same everywhere."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def some(names: Collection[str], limit: int = 5) -> str:
    """The first `limit` names in their order, then how many more there are."""
    shown = ", ".join(printable(name) for name in islice(names, limit))
    more = len(names) - limit
    return f"{shown} and {more:,} more" if more > 0 else shown


def count(number: int, noun: str) -> str:
    """`1 tensor`, `12 tensors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str, limit: int = 120) -> str:
    """`text` on one line: control and other unprintable characters escaped, the middle of long text cut."""
    escaped = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    if len(escaped) <= limit:
        return escaped
    half = limit // 2 - 2
    return f"{escaped[:half]}...{escaped[-half:]}"
