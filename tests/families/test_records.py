"""Records: found by listing, true to their schema, complete for their family, and cheap to read."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused, ToolError
from draftpair.families import (
    Family,
    Record,
    family,
    family_names,
    family_of_target,
    load_families,
    load_records,
    load_splits,
    read_record,
    record_text,
    split_family,
)
from draftpair.schemas import load_schema, schema_names

NAMES = family_names()
FAMILIES = tuple(load_families())
SPLIT = tuple(load_splits())
CHECKED = tuple(name for name in FAMILIES if name not in SPLIT)
RECOGNISED = tuple(name for name in NAMES if name not in FAMILIES)
DRAFTERS = tuple(
    sorted(
        entry.name[:-3]
        for entry in (resources.files("draftpair.runtime") / "drafters").iterdir()
        if entry.name.endswith(".py") and not entry.name.startswith("_")
    )
)


def facts(record: Record) -> dict[str, object]:
    """Everything that a record says, its rules included."""
    said = {key: value for key, value in vars(record).items() if not callable(value)}
    return said | {"rules": record.rules if isinstance(record, Family) else None}


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_record_is_true_to_its_schema(name: str) -> None:
    assert facts(read_record(record_text(name), name)) == facts(load_records()[name])


@pytest.mark.parametrize("name", SPLIT)
def test_a_family_that_is_split_is_a_name_in_every_room(name: str) -> None:
    assert split_family(name).name == split_family(name).drafter.model_type == name
    assert f"families/{name}" in schema_names()


@pytest.mark.parametrize("name", CHECKED)
def test_a_family_that_is_published_as_a_drafter_has_no_head_and_a_schema(name: str) -> None:
    record = family(name)
    assert (record.maturity, record.head, record.unsupported) == ("checked", None, None)
    assert f"families/{name}" in schema_names()
    with pytest.raises(ToolError, match="no family that can be split"):
        split_family(name)


def test_the_families_that_draftpair_runs_are_those_with_a_drafter_module() -> None:
    records = load_records()
    assert set(DRAFTERS) == {name for name in FAMILIES if "draftpair" in records[name].engines}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_family_that_is_only_recognised_says_why(name: str) -> None:
    record = load_records()[name]
    assert (record.maturity, isinstance(record, Family)) == ("recognised", False)
    assert record.unsupported
    assert f"families/{name}" not in schema_names()
    with pytest.raises(ToolError, match="no family of drafters"):
        family(name)


@pytest.mark.parametrize("name", SPLIT)
def test_no_two_rules_write_the_same_tensor_unless_they_are_alternatives(name: str) -> None:
    written: dict[str, set[str | None]] = {}
    for rule in family(name).rules:
        for output, _ in rule.outputs:
            alternatives = written.setdefault(output, set())
            assert rule.choice not in alternatives, output
            alternatives.add(rule.choice)
            assert None not in alternatives or len(alternatives) == 1, output
            assert len({str(choice).split(":")[0] for choice in alternatives}) == 1, output


@pytest.mark.parametrize("name", SPLIT)
def test_every_tensor_of_a_drafter_has_a_name_in_a_head(name: str) -> None:
    """A head goes back into a target under names that the same record reads."""
    rules = family(name).rules
    written = {output for rule in rules for output, _ in rule.outputs}
    copied = {rule.outputs[0].name for rule in rules if rule.transform == "copy" and len(rule.outputs) == 1}
    assert written == copied


@pytest.mark.parametrize("name", SPLIT)
def test_markers_are_tensors_of_the_record(name: str) -> None:
    markers = set(split_family(name).head.markers)
    assert markers <= {source for rule in family(name).rules for source, _ in rule.sources}


@pytest.mark.parametrize("name", FAMILIES)
def test_markers_of_a_drafter_are_tensors_of_the_record(name: str) -> None:
    rules = family(name).rules
    outputs = {output.format(layer=0, tap=0) for rule in rules for output, _ in rule.outputs}
    assert set(family(name).drafter.markers) <= outputs


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_published_as_a_drafter_is_marked_by_something(name: str) -> None:
    """A whole model is what is left: it is recognised by being one."""
    spec = family(name).drafter
    assert bool(spec.markers or spec.model_type or spec.architectures) == (spec.cache != "model")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rule_of_a_family_schema_says_what_a_finding_needs(name: str) -> None:
    common = {"$ref": "urn:draftpair:schema:pair-rules:1.0"}
    assert load_schema(f"families/{name}")["$defs"]["pair"]["allOf"][0] == common
    for part in ("config", "pair"):
        listed = load_schema(f"families/{name}")["$defs"][part]["allOf"]
        rules = [rule["rule"] for rule in listed if rule != common]
        ids = [rule["id"] for rule in rules]
        assert len(set(ids)) == len(ids)
        for rule in rules:
            assert rule["level"] in ("error", "warning", "note")
            assert rule["message"]
            assert rule.keys() <= {"id", "level", "message", "hint", "expected", "found"}


def test_no_two_families_that_are_split_share_a_target_and_a_place() -> None:
    """`model_type` and markers together name one family, so the order of the records decides nothing."""
    claims = [
        (name, model_type, prefix, marker)
        for name, record in load_splits().items()
        for model_type in record.target.model_types
        for prefix in record.head.prefixes
        for marker in record.head.markers
    ]
    owners: dict[tuple[str, str, str], set[str]] = {}
    for name, *claim in claims:
        owners.setdefault((claim[0], claim[1], claim[2]), set()).add(name)
    assert {claim: names for claim, names in owners.items() if len(names) > 1} == {}


def test_the_folder_is_the_registry() -> None:
    listed = {entry.name for entry in resources.files("draftpair.families").iterdir()}
    assert {f"{name}.toml" for name in NAMES} == {name for name in listed if name.endswith(".toml")}
    assert tuple(load_records()) == NAMES
    assert sorted(SPLIT + CHECKED + RECOGNISED) == list(NAMES)


def test_reading_the_records_costs_no_schema_library() -> None:
    code = "import sys; from draftpair.families import load_records; load_records(); print('jsonschema' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_family_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ToolError, match="no family of drafters is called 'nonesuch'") as error:
        family("nonesuch")
    assert "glm4_moe_lite_mtp" in str(error.value.hint)
    assert family_of_target(ConfigView({"model_type": "nonesuch"})) is None
    assert family_of_target(ConfigView({"model_type": "laguna"})) is None
    assert family_of_target(ConfigView({})) is None
    known = family("glm4_moe_lite_mtp")
    target = ConfigView({"model_type": "glm4_moe_lite"})
    assert family_of_target(target) == family_of_target(target, known) == known
    assert family_of_target(ConfigView({"model_type": "nonesuch"}), known) is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "inkling_mm_model", "text_config": {"model_type": "inkling_text"}},
        {"model_type": "inkling_mm_model", "text_config": {}},
        {"model_type": "wrapper", "text_config": {"model_type": "inkling_text"}},
        {"model_type": "inkling"},
    ],
    ids=["both", "root only", "text only", "flat"],
)
def test_a_target_is_known_by_the_type_of_either_level(config: dict[str, object]) -> None:
    found = family_of_target(ConfigView(config))
    assert found is not None
    assert found.name == "inkling_mtp"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "mtp"', 'kind = "mtp"\ncolour = "red"', "colour"),
        ('maturity = "stable"', 'maturity = "finished"', "finished"),
        ('maturity = "stable"', 'maturity = "experimental"', "'notes' is a required property"),
        ('maturity = "stable"', 'maturity = "recognised"', "'unsupported' is a required property"),
        ('depth = ["num_nextn_predict_layers"]', "", "'depth' is a required property"),
        ('transform = "stack"', 'transform = "shuffle"', "shuffle"),
        ('shape = ["hidden_size"]', 'shape = ["hidden_size + 1"]', "hidden_size \\+ 1"),
        ('output = "model.enorm.weight"', "", "/tensors/1"),
        ('prefixes = ["model."]', 'prefixes = ["model"]', "'model' does not match"),
        ('name = "glm4_moe_lite_mtp"', 'name = "other"', "calls itself 'other'"),
        ("[target]", "[target", "not TOML"),
    ],
    ids=[
        "unknown key",
        "maturity",
        "experimental without notes",
        "recognised with tensors",
        "missing key",
        "transform",
        "sum in a shape",
        "no output",
        "prefix without an end",
        "name",
        "syntax",
    ],
)
def test_a_bad_record_is_refused(old: str, new: str, message: str) -> None:
    lines = record_text("glm4_moe_lite_mtp").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("notes = "))
    assert old in text
    with pytest.raises(ToolError, match=message):
        read_record(text.replace(old, new, 1), "glm4_moe_lite_mtp")


def test_a_new_record_needs_no_other_edit() -> None:
    text = record_text("glm4_moe_lite_mtp").replace("glm4_moe_lite_mtp", "another_mtp")
    another = read_record(text, "another_mtp")
    assert isinstance(another, Family)
    assert another.drafter.model_type == "another_mtp"


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


def test_sums_are_of_products() -> None:
    config = ConfigView({"num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2, "d_rel": 3})
    rows = 4 * 8 + 2 * 2 * 8 + 4 * 3
    assert family("inkling_mtp").resolve(("global_qkvr_rows",), config) == (rows,)


@pytest.mark.parametrize("value", [None, "64", 1.5, -1, [8]], ids=repr)
def test_a_dimension_that_is_no_whole_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(Refused, match="hidden_size is"):
        family("glm4_moe_lite_mtp").resolve(("hidden_size",), ConfigView({"hidden_size": value}))


OTHERS = {
    "a bare base model": (
        "embed_tokens.weight",
        "norm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.mlp.up_proj.weight",
    ),
    "a DFlash drafter": (
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.0.self_attn.q_proj.weight",
    ),
    "an EAGLE-3 drafter": (
        "fc.weight",
        "embed_tokens.weight",
        "layers.0.hidden_norm.weight",
        "lm_head.weight",
        "d2t",
    ),
    "a bare Nemotron": ("embeddings.weight", "layers.0.mixer.in_proj.weight", "layers.0.mixer.q_proj.weight"),
    "a raw target with a head": (
        "model.layers.3.eh_proj.weight",
        "mtp.fc.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    ),
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("what", OTHERS)
def test_no_marker_of_a_drafter_is_a_tensor_of_something_else(name: str, what: str) -> None:
    assert not set(family(name).drafter.markers) & set(OTHERS[what])
