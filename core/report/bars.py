"""Bars of text, for shares of a whole: Unicode's eighths of a block, or ASCII where those cannot be written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

WIDTH = 40
"""Columns of a whole bar."""

_EIGHTHS = "▏▎▍▌▋▊▉█"


def can_show_blocks(encoding: str | None) -> bool:
    """Whether a stream of this encoding, None for an unknown one, can carry the blocks of a bar."""
    try:
        _EIGHTHS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(share: float, blocks: bool) -> str:
    """A share from 0 to 1 as a bar, without the blanks after it; more than nothing is never drawn as nothing."""
    steps = 8 if blocks else 1
    filled = max(round(share * WIDTH * steps), 1 if share else 0)
    if not blocks:
        return "#" * filled
    whole, rest = divmod(filled, 8)
    return _EIGHTHS[-1] * whole + (_EIGHTHS[rest - 1] if rest else "")


def bars(rows: Iterable[tuple[str, float, str]], blocks: bool) -> Iterator[str]:
    """A line for each (name, share, figure): the bars begin in one column, and so do the figures after them."""
    listed = list(rows)
    names = max((len(name) for name, _, _ in listed), default=0)
    figures = max((len(figure) for _, _, figure in listed), default=0)
    for name, share, figure in listed:
        yield f"  {name:<{names}}  {bar(share, blocks):<{WIDTH}}  {figure:>{figures}}"
