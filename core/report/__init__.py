"""Reports: one object a command, the same shape at every verbosity, each valid against its own schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from draftpair.schemas import load_schema
from draftpair.version import VERSION


def envelope(name: str, inputs: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """A whole report: the ``$id`` of the schema called ``name``, the tool, the inputs, then the body."""
    report = {
        "schema": load_schema(name)["$id"],
        "tool": {"name": "draftpair", "version": VERSION},
        "inputs": inputs,
        **body,
    }
    return dict(strict(report))


def strict(value: Any) -> Any:
    """The value as JSON can hold it: a number that JSON lacks, which Python's reader takes from a config all the
    same, becomes the text ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value
