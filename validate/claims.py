"""Which target a drafter's own files name: its card, and the verifier of the speculators format.

A name proves nothing. It is compared with the names that the target goes by, and only where both have some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.card import CARD, card_fields, card_text

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SPEED = re.compile(r"tok(?:en)?s?\s*(?:/|per)\s*s|speed-?\s?up|\d\s*x faster", re.IGNORECASE)


def claim_facts(target: Checkpoint, drafter: Checkpoint, proven: bool) -> dict[str, Any]:
    """The ``claim`` of the pair facts: ``same`` or ``other`` name, ``unknown`` where the target has none of its own.

    ``none`` where the drafter names no target, and where it is ``proven`` what it was made for: then no name is asked.
    What the target's card calls its base counts as its name where the drafter says the same, as for a conversion; a
    base of another name says nothing, for a model that was trained further has one. ``from`` says where the drafter
    names it.
    """
    if proven:
        return {"relation": "none", "drafter": [], "target": [], "from": None}
    made_for, place = _made_for(drafter)
    claimed = {name.lower() for name in made_for}
    base = {name for name in _card_models(target) if name.lower() in claimed}
    names = sorted({*_own_names(target), *base})
    if not made_for:
        relation = "none"
    elif not names:
        relation = "unknown"
    else:
        relation = "other" if claimed.isdisjoint(name.lower() for name in names) else "same"
    return {"relation": relation, "drafter": made_for, "target": names, "from": place}


def card_speaks_of_speed(drafter: Checkpoint) -> bool:
    """Whether the drafter's card has a figure of speed in it."""
    return bool(_SPEED.search(card_text(drafter)))


def _made_for(drafter: Checkpoint) -> tuple[list[str], str | None]:
    verifier = drafter.config.raw.get("speculators_config")
    verifier = verifier.get("verifier") if isinstance(verifier, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if isinstance(name, str) and _REPOSITORY.fullmatch(name):
        return [name], "speculators_config.verifier of config.json"
    models = _card_models(drafter)
    return (models, f"base_model of {CARD}") if models else ([], None)


def _own_names(checkpoint: Checkpoint) -> Iterator[str]:
    if (name := checkpoint.storage.hub_name) is not None:
        yield name.repository
    stated = checkpoint.config.raw.get("_name_or_path")
    if isinstance(stated, str) and _REPOSITORY.fullmatch(stated):
        yield stated


def _card_models(checkpoint: Checkpoint) -> list[str]:
    """The models that a card's front matter calls its base; none where it is no YAML."""
    named = (card_fields(checkpoint) or {}).get("base_model")
    listed = named if isinstance(named, list) else [named]
    return [name for name in listed if isinstance(name, str) and _REPOSITORY.fullmatch(name)]
