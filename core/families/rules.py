"""Rules written as JSON schemas: a violated sub-schema *is* the finding.

A family's schema holds ``$defs/config`` and ``$defs/pair``, each an ``allOf`` of sub-schemas that carry an
annotation ``rule``::

    {"rule": {"id": "PAIR-HIDDEN-SIZE", "level": "error", "message": "...{/hidden/target}...",
              "hint": "...", "expected": "/hidden/target", "found": "/hidden/drafter"},
     "properties": {"hidden": {"properties": {"relation": {"const": "equal"}}}}}

Rules that hold for every pair are those of ``pair-rules``, to which a family's ``pair`` refers; a family's own rule
takes the place of the common one with its id. ``{/pointer}`` in a message and the pointers ``expected`` and ``found``
are filled from the document; without them the schema's own keyword value and the offending value are reported.
``{problem}`` in a message is the offending place and what the schema has against it, or the key that is missing.
A rule whose id ends in ``-UNKNOWN`` says that the check could not be made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from math import isnan
from typing import TYPE_CHECKING, Any

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.families.bounds import no_numbers, overlong
from draftpair.findings import Finding
from draftpair.schemas import load_schema, schema_by_id, validator

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_ORIGINAL = "compare config.json with the original repository's"
# Facts of a pair may be sentences.
_LONGEST = 400
_PLACEHOLDER = re.compile(r"\{(/[^{}]*)\}")


def apply_rules(
    document: Mapping[str, Any],
    family: str,
    part: str,
    file: str | None = None,
    config: ConfigView | None = None,
) -> list[Finding]:
    """The findings of ``$defs/<part>`` of a family's schema on a document.

    ``part`` is ``config`` or ``pair``; ``file`` names the document in ``where``, and ``config`` says where in it the
    keys of a drafter's document lie that was read from it. Of a config that is longer than any model's nothing else
    is said.
    """
    if part == "config" and (found := overlong(document)):
        return [_overlong(*found, file, config)]
    findings = [
        finding
        for rule, note in _rules(family, part)
        for finding in _apply(document, rule, note, file, config)
    ]
    said = {finding.where for finding in findings}
    for pointer, value in no_numbers(config.raw if config else {}):
        where = _where(_place(pointer, config), file)
        if where not in said:
            said.add(where)
            findings.append(_no_number(value, where))
    return findings


@cache
def _rules(family: str, part: str) -> tuple[tuple[Validator, dict[str, Any]], ...]:
    """A validator and the annotation of each rule; a family's own stands for a common one with its id."""
    schema = load_schema(f"families/{family}")
    rules: dict[str, tuple[Validator, dict[str, Any]]] = {}
    for rule in schema["$defs"][part]["allOf"]:
        if "rule" in rule:
            rules[rule["rule"]["id"]] = (validator(rule, schema), rule["rule"])
        else:
            rules |= _common(rule["$ref"])
    return tuple(rules.values())


@cache
def _common(identifier: str) -> dict[str, tuple[Validator, dict[str, Any]]]:
    shared = schema_by_id(identifier)
    return {rule["rule"]["id"]: (validator(rule, shared), rule["rule"]) for rule in shared["allOf"]}


def _apply(
    document: Mapping[str, Any],
    rule: Validator,
    note: Mapping[str, Any],
    file: str | None,
    config: ConfigView | None,
) -> Iterator[Finding]:
    error = next(rule.iter_errors(document), None)
    if error is None:
        return
    pointer = "/" + "/".join(str(step) for step in error.absolute_path)
    place = _place(pointer, config)
    message = _PLACEHOLDER.sub(lambda m: _shown(look_up(document, m[1])), note["message"])
    message = message.replace("{problem}", _problem(error, place))
    yield Finding(
        rule=note["id"],
        level=note["level"],
        message=message,
        where=_where(place, file),
        expected=look_up(document, note["expected"]) if "expected" in note else _keyword_value(error),
        found=look_up(document, note["found"]) if "found" in note else _offending(error),
        hint=note.get("hint"),
    )


def _problem(error: Any, place: str) -> str:
    """What a schema has against a document; a validator names the keys that are missing one by one."""
    if error.validator != "required":
        return f"{place}: {printable(error.message)}"
    missing = next(key for key in error.validator_value if key not in error.instance)
    return f"{place.rstrip('/')}/{missing} is missing"


def _overlong(pointer: str, entries: int, most: int, file: str | None, config: ConfigView | None) -> Finding:
    place = _place(pointer, config)
    return Finding(
        "CONFIG-LENGTH",
        "error",
        f"{printable(place)} has {entries:,} entries; no model's config has more than {most:,} in one place",
        where=_where(place, file),
        expected=most,
        found=entries,
        hint=_ORIGINAL,
    )


def _no_number(value: float, where: str) -> Finding:
    said = "NaN" if isnan(value) else "infinite"
    message = f"{printable(where)} is {said}: no drafter computes with such a number"
    return Finding("CONFIG-NUMBER", "error", message, where, found=str(value), hint=_ORIGINAL)


def _where(place: str, file: str | None) -> str:
    return f"{file}#{place}" if file else place


def _place(pointer: str, config: ConfigView | None) -> str:
    """Where the file itself has the value at a pointer of the config that was read from it."""
    key, _, rest = pointer.strip("/").partition("/")
    there = config.where(key) if config and config.get(key) is not None else None
    return f"{there}/{rest}".rstrip("/") if there else pointer


def look_up(document: Any, pointer: str) -> Any:
    """The value at a JSON pointer, None when there is nothing."""
    for step in pointer.strip("/").split("/"):
        document = document.get(step) if isinstance(document, Mapping) else None
    return document


def _shown(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value), _LONGEST)


def _keyword_value(error: Any) -> Any:
    value = error.validator_value
    return value if isinstance(value, (str, int, float, bool, list)) else None


def _offending(error: Any) -> Any:
    value = error.instance
    return value if isinstance(value, (str, int, float, bool, list)) else None
