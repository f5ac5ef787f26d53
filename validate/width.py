"""Decides how many rows a verify block has, and says which rule decided and what the number counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused, Usage
from draftpair.families.record import Family
from draftpair.families.views import declared_width

OPTION = "--draft-block-size"
FLAG_VARIABLE = "LLAMA_ARG_DRAFT_BLOCK_SIZE"
OWN_VARIABLE = "MLXCEL_DRAFT_BLOCK_SIZE"
_MOST_DIGITS = len(str(2**64))
KIND_DEFAULTS = {"mtp": 4, "dflash": 16, "eagle3": 4, "full-model": 4}

log = logging.getLogger(__name__)


class Width(NamedTuple):
    """The rows of a verify block, the rule they came from, and what they are in words."""

    rows: int
    source: str
    meaning: str


def block_width(
    explicit: int | None, environ: Mapping[str, str], drafter: ConfigView, family: Family
) -> Width:
    """The option, the environment, the drafter's config.json, the family's default, the kind's: the first that speaks.

    ``drafter`` is the config under the family's keys. mlxcel reads ``LLAMA_ARG_DRAFT_BLOCK_SIZE`` as the option's own
    fallback and refuses text there, and ignores text in ``MLXCEL_DRAFT_BLOCK_SIZE`` with a warning. Raises Usage for
    a requested width, Refused for a declared one, outside the family's bounds.
    """
    requested = requested_width(explicit, environ)
    if requested is not None:
        rows, source = requested
        if not _fits(rows, family):
            raise Usage(f"{source} is {printable(str(rows), 40)}; {_expected(family)}")
        return _width(rows, source)
    declared = _declared(drafter, family)
    if declared is None:
        rule = family.drafter.block_size
        if rule.default is not None:
            return _width(rule.default, f"default for {family.name}")
        return _width(KIND_DEFAULTS[family.kind], f"default for {family.kind}")
    rows, source = declared
    if not _fits(rows, family):
        raise Refused(
            f"the drafter's config.json gives a block width of {printable(str(rows), 40)} ({source}); "
            f"{_expected(family)}",
            hint=f"give a width with {OPTION}",
        )
    return _width(rows, source)


def _width(rows: int, source: str) -> Width:
    proposals = "1 proposal" if rows == 2 else f"{rows - 1} proposals"
    return Width(rows, source, f"{rows} rows to verify: the last accepted token and {proposals}")


def requested_width(explicit: int | None, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """The rows asked for by the option or the environment, and which of them asked; None where neither does."""
    if explicit is not None:
        if type(explicit) is not int:
            raise Usage(f"{OPTION} is {printable(repr(explicit), 40)}; expected a whole number")
        return explicit, OPTION
    flag = environ.get(FLAG_VARIABLE)
    if flag:
        if not _is_number(flag):
            raise Usage(f"{FLAG_VARIABLE} is {printable(flag, 40)!r}; expected a whole number of 64 bits")
        return int(flag), FLAG_VARIABLE
    own = environ.get(OWN_VARIABLE)
    if own and _is_number(own):
        return int(own), OWN_VARIABLE
    if own:
        shown = printable(own, 40)
        log.warning("%s is %r, not a whole number of 64 bits; it is ignored", OWN_VARIABLE, shown)
    return None


def _is_number(text: str) -> bool:
    """Whether it is a whole number that another program could hold; Python itself reads no thousands of digits."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _declared(drafter: ConfigView, family: Family) -> tuple[int, str] | None:
    """The width by the family's own rule, the one the drafter names, else what follows from the depth of its head."""
    if own := declared_width(family, drafter):
        return own
    rule, depth = family.drafter.block_size, family.drafter_depth(drafter)
    if drafter.get(rule.key) is not None:
        named = drafter.require_int(rule.key)
        rows = named if rule.counts_bonus_token else named + 1
        return rows, f"{rule.key} of the drafter" + (
            "" if rule.counts_bonus_token else ", which counts proposals"
        )
    if rule.depth_plus is not None and depth and drafter.get(depth) is not None:
        trained = family.trained_width(drafter)
        return (trained[0], f"{trained[1]} of the drafter") if trained else None
    return None


def _fits(rows: int, family: Family) -> bool:
    return family.drafter.block_size.minimum <= rows <= family.drafter.block_size.maximum


def _expected(family: Family) -> str:
    rule = family.drafter.block_size
    return f"expected {rule.minimum} to {rule.maximum} for {family.name}"
