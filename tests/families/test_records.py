"""Records: found by listing, checked by their schema, and complete for their family."""

from __future__ import annotations

from importlib import resources

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused, ToolError
from draftpair.families import family, family_names, family_of_target, load_families, read_record
from draftpair.schemas import load_schema, schema_names

NAMES = family_names()


def record_text(name: str) -> str:
    return resources.files("draftpair.families").joinpath(f"{name}.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_a_name_in_every_room(name: str) -> None:
    assert family(name).name == name
    assert f"families/{name}" in schema_names()
    assert resources.files("draftpair.runtime").joinpath("drafters", f"{name}.py").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_no_two_rules_write_the_same_tensor_unless_they_are_alternatives(name: str) -> None:
    written: dict[str, set[str | None]] = {}
    for rule in family(name).rules:
        for output in rule.outputs:
            alternatives = written.setdefault(output, set())
            assert rule.choice not in alternatives, output
            alternatives.add(rule.choice)
            assert None not in alternatives or len(alternatives) == 1, output


@pytest.mark.parametrize("name", NAMES)
def test_markers_are_tensors_of_the_record(name: str) -> None:
    record = family(name)
    assert set(record.head.markers) <= {rule.source for rule in record.rules}
    assert set(record.drafter.markers) <= {output for rule in record.rules for output in rule.outputs}


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_of_a_family_schema_says_what_a_finding_needs(name: str) -> None:
    for part in ("config", "pair"):
        rules = [rule["rule"] for rule in load_schema(f"families/{name}")["$defs"][part]["allOf"]]
        ids = [rule["id"] for rule in rules]
        assert len(set(ids)) == len(ids)
        for rule in rules:
            assert rule["level"] in ("error", "warning", "note")
            assert rule["message"]
            assert rule.keys() <= {"id", "level", "message", "hint", "expected", "found"}


def test_the_folder_is_the_registry() -> None:
    listed = {entry.name for entry in resources.files("draftpair.families").iterdir()}
    assert {f"{name}.toml" for name in NAMES} == {name for name in listed if name.endswith(".toml")}
    assert tuple(load_families()) == NAMES


def test_an_unknown_family_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ToolError, match="no family is called 'nonesuch'") as error:
        family("nonesuch")
    assert "glm4_moe_lite_mtp" in str(error.value.hint)
    assert family_of_target("llama") is None
    assert family_of_target(None) is None
    known = family("glm4_moe_lite_mtp")
    assert family_of_target("glm4_moe_lite") == family_of_target("glm4_moe_lite", known) == known
    assert family_of_target("llama", known) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "mtp"', 'kind = "mtp"\ncolour = "red"', "colour"),
        ('maturity = "stable"', 'maturity = "finished"', "finished"),
        ('depth = "num_nextn_predict_layers"', "", "'depth' is a required property"),
        ('transform = "stack"', 'transform = "shuffle"', "shuffle"),
        ('shape = ["hidden_size"]', 'shape = ["hidden_size + 1"]', "hidden_size \\+ 1"),
        ('output = "model.enorm.weight"', "", "/tensors/1"),
        ('name = "glm4_moe_lite_mtp"', 'name = "other"', "calls itself 'other'"),
        ("[target]", "[target", "not TOML"),
    ],
    ids=[
        "unknown key",
        "maturity",
        "missing key",
        "transform",
        "sum in a shape",
        "no output",
        "name",
        "syntax",
    ],
)
def test_a_bad_record_is_refused(old: str, new: str, message: str) -> None:
    text = record_text("glm4_moe_lite_mtp")
    assert old in text
    with pytest.raises(ToolError, match=message):
        read_record(text.replace(old, new, 1), "glm4_moe_lite_mtp")


def test_a_new_record_needs_no_other_edit() -> None:
    text = record_text("glm4_moe_lite_mtp").replace("glm4_moe_lite_mtp", "another_mtp")
    assert read_record(text, "another_mtp").drafter.model_type == "another_mtp"


def test_shapes_are_products_of_keys_sums_and_numbers() -> None:
    record = family("glm4_moe_lite_mtp")
    config = ConfigView(
        {
            "hidden_size": 8,
            "num_attention_heads": 3,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "attention_bias": True,
        }
    )
    assert record.resolve(("2 * hidden_size",), config) == (16,)
    assert record.resolve(("num_attention_heads * q_head_dim", "hidden_size"), config) == (18, 8)
    assert record.resolve(("attention_bias * hidden_size",), config) == (8,)
    assert record.resolve(("n_routed_experts",), config) == (0,)  # a default of the record


@pytest.mark.parametrize("value", [None, "64", 1.5, -1, [8]], ids=repr)
def test_a_dimension_that_is_no_whole_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(Refused, match="hidden_size is"):
        family("glm4_moe_lite_mtp").resolve(("hidden_size",), ConfigView({"hidden_size": value}))
