"""How a family's config.json is read where its keys are nested, spelt in several ways, or differ by layer.

A record names its view; the view is the module of that name in this folder, and may hold any of these functions:

``canonical(config)``
    the config under one set of flat keys, and findings where two spellings say different things. It holds ``taps``,
    the number of target layers the drafter reads, where the family reads several.
``layer(config, number)``
    the canonical config for one of the drafter's layers, where their sizes differ.
``block_width(config)``
    the rows of a verify block and in words where they come from, None where nothing is declared.
``check(checkpoint, config)``
    findings that no schema can express, from config and headers;
``check_values(checkpoint, config)``
    those for which tensors have to be read.

Nothing here raises for a value of a wrong type: it is left in place, and the family's schema reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.bounds import overlong
from draftpair.families.record import Family
from draftpair.findings import Finding


def canonical(family: Family, config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """The config under the keys that the family's record uses, and what its spellings disagree about.

    The settings of the rotary embedding are judged where the family has them. A config that is longer than any
    model's is left as it is.
    """
    view = _view(family)
    if view is None or not hasattr(view, "canonical") or overlong(config.raw):
        return config, []
    read: ConfigView
    findings: list[Finding]
    read, findings = view.canonical(config)
    said = {finding.where for finding in (*config.rope.conflicts, *findings)}
    return read, [*findings, *(finding for finding in read.rope.conflicts if finding.where not in said)]


def of_layer(family: Family, config: ConfigView, number: int) -> ConfigView:
    """The canonical config as layer ``number`` of the drafter has it."""
    view = _view(family)
    if view is None or not hasattr(view, "layer"):
        return config
    own: ConfigView = view.layer(config, number)
    return own


def declared_width(family: Family, config: ConfigView) -> tuple[int, str] | None:
    """The rows of a verify block by the family's own rule, and the rule; None where it has none or nothing is said."""
    view = _view(family)
    if view is None or not hasattr(view, "block_width"):
        return None
    width: tuple[int, str] | None = view.block_width(config)
    return width


def own_checks(
    family: Family, checkpoint: Checkpoint, config: ConfigView, values: bool = True
) -> Iterator[Finding]:
    """What only the family's view can say of a drafter's folder; no tensor is read without ``values``."""
    view = _view(family)
    if view is not None and hasattr(view, "check"):
        yield from view.check(checkpoint, config)
    if view is not None and values and hasattr(view, "check_values"):
        yield from view.check_values(checkpoint, config)


def _view(family: Family) -> ModuleType | None:
    return import_module(f"{__name__}.{family.drafter.view}") if family.drafter.view else None
