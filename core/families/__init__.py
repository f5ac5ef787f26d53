"""Family records, found by listing this folder: adding a family adds files and edits none.

``load_families`` reads the records of drafters that can be checked, ``load_splits`` those of them that can be cut out
of a target, ``load_records`` those as well of what is only recognised; ``family`` gives one by name; ``heads`` and
``drafters`` recognise them in checkpoints. The records of this folder are held to their schema by the test suite,
``read_record`` holds any other text to it: to check them all takes several times as long as to read them, and every
command reads them.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.errors import ToolError, Usage
from draftpair.families.parse import parse_record
from draftpair.families.record import Family, Record, SplitFamily
from draftpair.families.specs import TensorRule
from draftpair.schemas import check, load_schema

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Family", "Record", "SplitFamily", "TensorRule", "family", "family_names", "family_of_target", "load_families",
    "load_records", "load_splits", "read_record", "record_text", "split_family",
]  # fmt: skip


@lru_cache(maxsize=1)
def family_names() -> tuple[str, ...]:
    """The names of all records, sorted."""
    folder = resources.files(__package__)
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def family(name: str) -> Family:
    """The record called ``name``. Raises Usage for an unknown name, listing the known ones."""
    record = _record(name) if name in family_names() else None
    if isinstance(record, Family):
        return record
    raise Usage(
        f"no family of drafters is called {name!r}",
        hint="known families: " + ", ".join(load_families()),
    )


def split_family(name: str) -> SplitFamily:
    """The record called ``name`` of a family that can be split. Raises Usage for any other name."""
    record = _record(name) if name in family_names() else None
    if isinstance(record, SplitFamily):
        return record
    raise Usage(
        f"no family that can be split is called {name!r}",
        hint="known families: " + ", ".join(load_splits()),
    )


@cache
def _record(name: str) -> Record:
    return parse_record(tomllib.loads(record_text(name)))


def record_text(name: str) -> str:
    """The TOML text of the record called ``name``, as it is shipped."""
    return resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def read_record(text: str, name: str) -> Record:
    """A record from its TOML text, held to the record schema.

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


def load_records() -> dict[str, Record]:
    """Every record by name, sorted by name, those of families that are only recognised included."""
    return {name: _record(name) for name in family_names()}


@lru_cache(maxsize=1)
def load_families() -> dict[str, Family]:
    """The record of every family whose drafters can be checked, by name, sorted by name."""
    return {name: record for name, record in load_records().items() if isinstance(record, Family)}


@lru_cache(maxsize=1)
def load_splits() -> dict[str, SplitFamily]:
    """The record of every family that can be split, by name, sorted by name."""
    return {name: record for name, record in load_records().items() if isinstance(record, SplitFamily)}


def family_of_target(config: ConfigView, prefer: Family | None = None) -> SplitFamily | None:
    """A family whose heads belong to targets with the ``model_type`` of this config, None when there is none.

    Several families of heads may serve one target. ``prefer`` is the one that a drafter or a head at hand belongs to;
    without it, or when it is no head or does not serve the target, the first by name stands for all.
    """
    serving = [family for family in load_splits().values() if family.serves(config)]
    return next((family for family in serving if family is prefer), next(iter(serving), None))
