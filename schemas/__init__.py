"""The JSON schemas draftpair ships (draft 2020-12), and the one way to load and apply them.

``load_schema("inspect")`` gives a report's schema, ``load_schema("families/<family>")`` a family's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib import resources
from math import isfinite
from typing import TYPE_CHECKING, Any

from draftpair.errors import Usage

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator
    from referencing import Registry


@lru_cache(maxsize=1)
def schema_names() -> tuple[str, ...]:
    """The names of all schemas, sorted; a family's is ``families/<family>``."""
    root = resources.files(__package__)
    names = [entry.name[:-5] for entry in root.iterdir() if entry.name.endswith(".json")]
    inner = [f"families/{e.name[:-5]}" for e in (root / "families").iterdir() if e.name.endswith(".json")]
    return tuple(sorted(names) + sorted(inner))


@cache
def load_schema(name: str) -> dict[str, Any]:
    """The schema called ``name``. Raises Usage for an unknown name, listing the known ones."""
    if name not in schema_names():
        raise Usage(f"no schema is called {name!r}", hint="known schemas: " + ", ".join(schema_names()))
    path = resources.files(__package__).joinpath(f"{name}.json")
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def bundled(name: str) -> dict[str, Any]:
    """The schema called ``name`` with every schema it refers to in its ``$defs``, so that it can be used alone."""
    by_id = {load_schema(other)["$id"]: load_schema(other) for other in schema_names()}
    schema = load_schema(name)
    found: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for reference in _references(waiting.pop()):
            base = reference.partition("#")[0]
            if base and base != schema["$id"] and base not in found:
                found[base] = by_id[base]
                waiting.append(by_id[base])
    return {**schema, "$defs": {**schema.get("$defs", {}), **found}} if found else schema


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def violations(document: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    """Every violation in a document; a ``$ref`` may name any of our schemas by its ``$id``."""
    from jsonschema import Draft202012Validator

    yield from Draft202012Validator(dict(schema), registry=_registry()).iter_errors(document)


@cache
def schema_by_id(identifier: str) -> dict[str, Any]:
    """The schema with this ``$id``. Raises KeyError for one of somebody else's."""
    return {load_schema(name)["$id"]: load_schema(name) for name in schema_names()}[identifier]


def validator(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Validator:
    """A validator of a part of one of our schemas by itself, to be kept: it takes longer to make than to apply.

    NaN and infinity, which Python reads from JSON, are no numbers to it: NaN is below no bound.
    """
    return _finite_validator()({**part, "$defs": schema.get("$defs", {})}, registry=_registry())


@cache
def _finite_validator() -> type[Validator]:
    from jsonschema import Draft202012Validator, validators

    known = Draft202012Validator.TYPE_CHECKER

    def is_number(_: object, value: object) -> bool:
        return known.is_type(value, "number") and (not isinstance(value, float) or isfinite(value))

    extend: Any = validators.extend  # it has no types
    finite: type[Validator] = extend(Draft202012Validator, type_checker=known.redefine("number", is_number))
    return finite


@lru_cache(maxsize=1)
def _registry() -> Registry[Any]:
    from referencing import Registry, Resource

    schemas = [load_schema(name) for name in schema_names()]
    return Registry().with_resources((s["$id"], Resource.from_contents(s)) for s in schemas)


def check(document: Any, schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document, one sentence a violation, each with the JSON pointer of the place."""
    return [f"{_pointer(error.absolute_path)}: {error.message}" for error in violations(document, schema)]


def _pointer(path: Any) -> str:
    return "/" + "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in path)
