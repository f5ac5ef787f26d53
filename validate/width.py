"""Decides how many rows a verify block has, and says which rule decided.

The width counts the bonus token: n rows verify n - 1 proposals.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused, Usage
from draftpair.families.record import Family

OPTION = "--draft-block-size"
FLAG_VARIABLE = "LLAMA_ARG_DRAFT_BLOCK_SIZE"
OWN_VARIABLE = "MLXCEL_DRAFT_BLOCK_SIZE"
KIND_DEFAULTS = {"mtp": 4, "dflash": 16}

log = logging.getLogger(__name__)


def block_width(
    explicit: int | None, environ: Mapping[str, str], drafter: ConfigView, family: Family
) -> tuple[int, str]:
    """(width, where it came from): the option, the environment, the drafter's config.json, the kind's default.

    mlxcel reads ``LLAMA_ARG_DRAFT_BLOCK_SIZE`` as the option's own fallback and refuses text there, and
    ignores text in ``MLXCEL_DRAFT_BLOCK_SIZE`` with a warning. Usage for a requested width, Refused for a
    declared one, outside the family's bounds.
    """
    requested = _requested(explicit, environ)
    if requested is not None:
        width, source = requested
        if not _fits(width, family):
            raise Usage(f"{source} is {width}; {_expected(family)}")
        return requested
    declared = _declared(drafter, family)
    if declared is None:
        return KIND_DEFAULTS[family.kind], f"default for {family.kind}"
    width, source = declared
    if not _fits(width, family):
        raise Refused(
            f"the drafter's config.json gives a block width of {width} ({source}); {_expected(family)}",
            hint=f"give a width with {OPTION}",
        )
    return declared


def _requested(explicit: int | None, environ: Mapping[str, str]) -> tuple[int, str] | None:
    if explicit is not None:
        return explicit, OPTION
    flag = environ.get(FLAG_VARIABLE)
    if flag:
        if not flag.isdecimal():
            raise Usage(f"{FLAG_VARIABLE} is {flag!r}; expected a whole number")
        return int(flag), FLAG_VARIABLE
    own = environ.get(OWN_VARIABLE)
    if own and own.isdecimal():
        return int(own), OWN_VARIABLE
    if own:
        log.warning("%s is %r, not a whole number; it is ignored", OWN_VARIABLE, own)
    return None


def _declared(drafter: ConfigView, family: Family) -> tuple[int, str] | None:
    """The width the drafter names, else what follows from the depth of its head."""
    rule, depth = family.drafter.block_size, family.drafter_depth(drafter)
    if drafter.get(rule.key) is not None:
        return drafter.require_int(rule.key), f"{rule.key} of the drafter"
    if depth and drafter.get(depth) is not None:
        width, why = family.trained_width(drafter)
        return width, f"{why} of the drafter"
    return None


def _fits(width: int, family: Family) -> bool:
    return family.drafter.block_size.minimum <= width <= family.drafter.block_size.maximum


def _expected(family: Family) -> str:
    rule = family.drafter.block_size
    return f"expected {rule.minimum} to {rule.maximum} for {family.name}"
