"""What no config.json of a model holds, whatever its family: lists without end, and numbers that are none."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.families.specs import MOST

_MOST_KEYS = 3 * MOST
"""Most keys of one object. The longest are lists of labels, and settings by module."""
_UNREAD = "quantization_config"
"""What other packings than MLX's say, for each matrix of each expert: no rule reads it, so it may be of any length."""


def overlong(document: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """The JSON pointer of a list or object with more entries than any config has, its entries, and the bound.

    None where there is none. Lists go by layer or by expert. To read such a config further would take minutes.
    """
    for pointer, value, _ in _nested(document):
        most = MOST if isinstance(value, list) else _MOST_KEYS
        if isinstance(value, (list, Mapping)) and len(value) > most:
            return pointer or "/", len(value), most
    return None


def no_numbers(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """NaN wherever it stands, and infinity outside of lists, each with its JSON pointer.

    In a list infinity may be the open end of a range, as in Mamba's ``time_step_limit``.
    """
    for pointer, value, parent in _nested(document):
        in_list = isinstance(parent, list)
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not in_list)):
            yield pointer, value


def _nested(document: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Every value that rules may read, outer ones first, with its JSON pointer and what it is an entry of."""
    waiting: deque[tuple[str, Any, Any]] = deque([("", document, None)])
    while waiting:
        pointer, value, parent = waiting.popleft()
        yield pointer, value, parent
        if isinstance(value, (list, Mapping)):
            entries = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting.extend((f"{pointer}/{key}", entry, value) for key, entry in entries if key != _UNREAD)
