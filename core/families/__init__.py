"""Family records, found by listing this folder: adding a family adds files and edits none.

``load_families`` reads and checks every record; ``family`` gives one by name; ``heads`` and ``drafters``
recognise them in checkpoints.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from draftpair.errors import ToolError, Usage
from draftpair.families.record import Family, TensorRule, parse_record
from draftpair.schemas import check, load_schema

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Family", "TensorRule", "family", "family_names", "family_of_target", "load_families"]


@lru_cache(maxsize=1)
def family_names() -> tuple[str, ...]:
    """The names of all records, sorted."""
    folder = resources.files(__package__)
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


@cache
def family(name: str) -> Family:
    """The record called ``name``. Raises Usage for an unknown name, listing the known ones."""
    if name not in family_names():
        raise Usage(
            f"no family is called {name!r}",
            hint="known families: " + ", ".join(family_names()),
        )
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return read_record(text, name)


def read_record(text: str, name: str) -> Family:
    """A record from its TOML text, checked against the record schema.

    Raises ToolError when the text is not TOML, breaks the schema, or calls itself something else.
    """
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ToolError(f"family record {name}.toml is not TOML: {error}") from error
    problems = check(data, load_schema("family-record"))
    if problems:
        raise ToolError(f"family record {name}.toml: " + "; ".join(problems[:5]))
    if data["name"] != name:
        raise ToolError(f"family record {name}.toml calls itself {data['name']!r}")
    return parse_record(data)


def load_families() -> dict[str, Family]:
    """Every record by name, sorted by name."""
    return {name: family(name) for name in family_names()}


def family_of_target(model_type: str | None, prefer: Family | None = None) -> Family | None:
    """A family whose targets have this ``model_type``, None when there is none.

    Several families of drafters may serve one target. ``prefer`` is the one that a drafter or a head at hand
    belongs to; without it, or when it does not serve the target, the first by name stands for all.
    """
    serving = [f for f in load_families().values() if model_type in f.target.model_types]
    return prefer if prefer in serving else next(iter(serving), None)
