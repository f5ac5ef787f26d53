"""The front matter of a checkpoint's model card, README.md: what the Hub reads of it."""

from __future__ import annotations

import re
from typing import Any

from draftpair.checkpoint.checkpoint import Checkpoint

CARD = "README.md"
_CARD_BYTES, _FRONT_CHARACTERS = 1 << 20, 1 << 16
_FRONT = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)


def card_text(checkpoint: Checkpoint) -> str:
    """The text of the card, of a long one its first MiB; empty where there is none."""
    if not checkpoint.has_file(CARD):
        return ""
    return checkpoint.storage.read_whole(CARD, _CARD_BYTES).decode("utf-8", "replace")


def card_fields(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The fields of the front matter, every scalar as text; {} where there is none, None where it is no YAML object.

    As text, because YAML takes the language code `no` for a boolean, and a date that no calendar has for an error.
    """
    front = _FRONT.match(card_text(checkpoint)[:_FRONT_CHARACTERS])
    if front is None:
        return {}
    import yaml

    try:
        fields = yaml.load(front[1], Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
