"""Rules written as JSON schemas: a violated sub-schema *is* the finding.

A family's schema holds ``$defs/config`` and ``$defs/pair``, each an ``allOf`` of sub-schemas that carry an
annotation ``rule``::

    {"rule": {"id": "PAIR-HIDDEN-SIZE", "level": "error", "message": "...{/hidden/target}...",
              "hint": "...", "expected": "/hidden/target", "found": "/hidden/drafter"},
     "properties": {"hidden": {"properties": {"relation": {"const": "equal"}}}}}

``{/pointer}`` in a message and the pointers ``expected`` and ``found`` are filled from the document; without
them the schema's own keyword value and the offending value are reported. ``{problem}`` in a message is the
offending place and what the schema has against it. A rule whose id ends in
``-UNKNOWN`` says that the check could not be made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.checkpoint.wording import printable
from draftpair.findings import Finding
from draftpair.schemas import load_schema, violations

_PLACEHOLDER = re.compile(r"\{(/[^{}]*)\}")


def apply_rules(
    document: Mapping[str, Any], family: str, part: str, file: str | None = None
) -> list[Finding]:
    """The findings of ``$defs/<part>`` of a family's schema on a document.

    ``part`` is ``config`` or ``pair``; ``file`` names the document in ``where``.
    """
    schema = load_schema(f"families/{family}")
    here = f"{schema['$id']}#/$defs/{part}/allOf"
    rules = [rule["rule"] for rule in schema["$defs"][part]["allOf"]]
    return [f for i, note in enumerate(rules) for f in _apply(document, f"{here}/{i}", note, file)]


def _apply(
    document: Mapping[str, Any], reference: str, note: Mapping[str, Any], file: str | None
) -> Iterator[Finding]:
    error = next(violations(document, {"$ref": reference}), None)
    if error is None:
        return
    pointer = "/" + "/".join(str(step) for step in error.absolute_path)
    message = _PLACEHOLDER.sub(lambda m: _shown(look_up(document, m[1])), note["message"])
    message = message.replace("{problem}", f"{pointer}: {printable(error.message)}")
    yield Finding(
        rule=note["id"],
        level=note["level"],
        message=message,
        where=f"{file}#{pointer}" if file else pointer,
        expected=look_up(document, note["expected"]) if "expected" in note else _keyword_value(error),
        found=look_up(document, note["found"]) if "found" in note else _offending(error),
        hint=note.get("hint"),
    )


def look_up(document: Any, pointer: str) -> Any:
    """The value at a JSON pointer, None when there is nothing."""
    for step in pointer.strip("/").split("/"):
        document = document.get(step) if isinstance(document, Mapping) else None
    return document


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _keyword_value(error: Any) -> Any:
    value = error.validator_value
    return value if isinstance(value, (str, int, float, bool, list)) else None


def _offending(error: Any) -> Any:
    value = error.instance
    return value if isinstance(value, (str, int, float, bool, list)) else None
