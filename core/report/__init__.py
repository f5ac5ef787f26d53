"""Reports: one object a command, the same shape at every verbosity, each valid against its own schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftpair.schemas import load_schema
from draftpair.version import VERSION


def envelope(name: str, inputs: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """A whole report: the ``$id`` of the schema called ``name``, the tool, the inputs, then the body."""
    return {
        "schema": load_schema(name)["$id"],
        "tool": {"name": "draftpair", "version": VERSION},
        "inputs": dict(inputs),
        **body,
    }
