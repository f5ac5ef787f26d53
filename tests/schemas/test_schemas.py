"""Every shipped schema is a valid draft 2020-12 schema, closed, and reachable by its id."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator

from draftpair.errors import ToolError
from draftpair.schemas import bundled, check, load_schema, schema_names


@pytest.mark.parametrize("name", schema_names())
def test_a_schema_is_valid_and_named_after_its_file(name: str) -> None:
    schema = load_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"].startswith(f"urn:draftpair:schema:{name}:")


def references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(v) for v in value.values()))
    return set().union(*(references(v) for v in value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("name", schema_names())
def test_every_reference_leads_somewhere(name: str) -> None:
    ids = {load_schema(other)["$id"]: load_schema(other) for other in schema_names()}
    for reference in references(load_schema(name)):
        base, _, pointer = reference.partition("#")
        document: object = ids[base] if base else load_schema(name)
        for step in pointer.strip("/").split("/") if pointer else []:
            document = document[step]  # type: ignore[index]
        assert document is not None


def test_an_unknown_schema_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ToolError, match="no schema is called 'nonesuch'") as error:
        load_schema("nonesuch")
    assert "inspect" in str(error.value.hint)


def test_problems_name_the_place() -> None:
    problems = check({"rule": "lower case", "level": "error"}, load_schema("finding"))
    assert any(problem.startswith("/rule:") for problem in problems)
    assert any("'message' is a required property" in problem for problem in problems)


@pytest.mark.parametrize("name", schema_names())
def test_a_printed_schema_can_be_used_alone(name: str) -> None:
    schema = bundled(name)
    Draft202012Validator.check_schema(schema)
    inside = {schema["$id"], *(entry.get("$id") for entry in schema.get("$defs", {}).values())}
    assert {reference.partition("#")[0] for reference in references(schema)} - {""} <= inside


def test_a_bundled_report_schema_finds_what_the_whole_set_finds() -> None:
    finding = {
        "rule": "x",
        "level": "error",
        "message": "m",
        "where": None,
        "expected": 1,
        "found": 1,
        "hint": None,
    }
    report = {"integrity": {"findings": [finding]}}
    alone = {error.message for error in Draft202012Validator(bundled("inspect")).iter_errors(report)}
    assert "'x' does not match '^[A-Z0-9]+(-[A-Z0-9]+)*$'" in alone
