"""The config view: two levels, null as absent, places, and three generations of RoPE keys."""

from __future__ import annotations

import json
import math

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.config import parse_config
from draftpair.errors import Refused


def rope(config: dict):
    return ConfigView(config).rope


def test_text_config_comes_before_the_root():
    view = ConfigView({"hidden_size": 1, "vocab_size": 9, "text_config": {"hidden_size": 2}})
    assert (view.get("hidden_size"), view.where("hidden_size")) == (2, "/text_config/hidden_size")
    assert (view.get("vocab_size"), view.where("vocab_size")) == (9, "/vocab_size")


def test_null_equals_absent():
    view = ConfigView({"a": 1, "b": None, "text_config": {"a": None, "b": None}})
    assert (view.get("a"), view.where("a")) == (1, "/a")
    assert (view.get("b", 7), view.where("b")) == (7, None)
    assert (view.get("c"), view.where("c")) == (None, None)


def test_false_and_zero_are_values():
    view = ConfigView({"a": 1, "b": True, "text_config": {"a": 0, "b": False}})
    assert view.get("a") == 0
    assert view.get("b") is False


def test_pointers_are_escaped():
    assert ConfigView({"a/b~c": 1}).where("a/b~c") == "/a~1b~0c"


def test_model_types():
    view = ConfigView({"model_type": "outer", "text_config": {"model_type": "inner"}})
    assert (view.model_type, view.root_model_type) == ("inner", "outer")
    assert ConfigView({"model_type": "flat"}).model_type == "flat"
    assert ConfigView({"model_type": 3}).model_type is None
    assert ConfigView({}).root_model_type is None


def test_required_integers():
    view = ConfigView({"text_config": {"hidden_size": 64, "layers": 0}})
    assert view.require_int("hidden_size") == 64
    assert view.require_int("layers") == 0
    with pytest.raises(Refused, match=r"config\.json: /text_config/layers is 0, expected .* at least 1"):
        view.require_int("layers", minimum=1)
    with pytest.raises(Refused, match=r"config\.json does not state vocab_size"):
        view.require_int("vocab_size")


@pytest.mark.parametrize("value", ["64", 64.0, True, [64], math.nan, -1], ids=repr)
def test_what_is_no_required_integer(value):
    with pytest.raises(Refused, match=r"config\.json: /hidden_size is"):
        ConfigView({"hidden_size": value}).require_int("hidden_size")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ("{", "is not JSON: expecting property name"),
        ("", "is not JSON: expecting value"),
        ('{"a": ' * 50_000, "nested too deeply"),
        ('{"text_config": []}', "text_config that is not an object"),
        ('{"text_config": "x"}', "text_config that is not an object"),
    ],
    ids=["array", "null", "cut", "empty", "nested", "text_config a list", "text_config a string"],
)
def test_unusable_configs_are_findings(text, problem):
    _, findings = parse_config(text.encode())
    assert [(finding.rule, finding.level) for finding in findings] == [("CONFIG-PARSE", "error")]
    assert problem in findings[0].message
    assert findings[0].hint


def test_a_byte_order_mark_is_called_by_its_name():
    (finding,) = parse_config(b"\xef\xbb\xbf{}")[1]
    assert finding.message.endswith("it starts with a byte order mark; save it as UTF-8 without one")


def test_not_utf8_is_a_finding():
    assert "not UTF-8" in parse_config(b"\xff")[1][0].message


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ('{"a": 1, "a": 2}', "warning"),
        ('{"a": Infinity, "b": 1, "b": 2}', "warning"),
        ('{"time_step_limit": [0.0, Infinity]}', "note"),
        ('{"a": NaN}', "note"),
    ],
)
def test_what_only_python_reads_is_said_and_a_warning_where_readers_may_differ(text, level):
    view, findings = parse_config(text.encode())
    assert [(finding.rule, finding.level) for finding in findings] == [("CONFIG-PARSE", level)]
    assert view.raw


def test_null_text_config_means_none():
    view, findings = parse_config(b'{"text_config": null, "hidden_size": 3}')
    assert (view.get("hidden_size"), findings) == (3, [])


YARN = {"rope_type": "yarn", "factor": 4.0}
GENERATIONS = [
    pytest.param({}, None, None, None, None, id="nothing"),
    pytest.param({"rope_theta": 5000}, 5000, None, None, "/rope_theta", id="flat"),
    pytest.param(
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5},
        1e6,
        YARN,
        0.5,
        "/rope_theta",
        id="flat with everything",
    ),
    pytest.param(
        {"text_config": {"rope_theta": 7.0, "rope_scaling": None}},
        7,
        None,
        None,
        "/text_config/rope_theta",
        id="text",
    ),
    pytest.param(
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        1e6,
        None,
        None,
        "/rope_parameters/rope_theta",
        id="nested",
    ),
    pytest.param(
        {"rope_parameters": {"rope_theta": 1e6, **YARN, "partial_rotary_factor": 0.25, "beta_fast": None}},
        1e6,
        YARN,
        0.25,
        "/rope_parameters/rope_theta",
        id="nested with everything",
    ),
    pytest.param(
        {"rope_theta": 9.0, "rope_scaling": YARN, "rope_parameters": {"partial_rotary_factor": 0.5}},
        9,
        YARN,
        0.5,
        "/rope_theta",
        id="nested completed by flat",
    ),
    pytest.param(
        {
            "text_config": {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                    "full_attention": {"rope_theta": 1e6, **YARN},
                }
            }
        },
        1e6,
        YARN,
        None,
        "/text_config/rope_parameters/full_attention/rope_theta",
        id="by layer type",
    ),
    pytest.param(
        {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10]}},
        1e7,
        {"rope_type": "default", "mrope_section": [11, 11, 10]},
        None,
        "/rope_parameters/rope_theta",
        id="sections of plain RoPE",
    ),
]


@pytest.mark.parametrize(("config", "theta", "scaling", "partial", "where"), GENERATIONS)
def test_rope_generations_resolve_to_one(config, theta, scaling, partial, where):
    found = rope(config)
    assert (found.theta, found.scaling, found.partial, found.where) == (theta, scaling, partial, where)
    assert found.conflicts == ()


def test_every_layer_type_is_kept():
    found = rope({"rope_parameters": {"sliding": {"rope_theta": 1e4}, "global": {"rope_theta": 1e6}}})
    assert {name: part.theta for name, part in found.layer_types.items()} == {"sliding": 1e4, "global": 1e6}
    assert found.theta == 1e4


CONFLICTS = [
    pytest.param(
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0", id="theta"
    ),
    pytest.param(
        {"partial_rotary_factor": 1, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5 in /rope_parameters but 1.0 at /partial_rotary_factor",
        id="partial",
    ),
    pytest.param(
        {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        "rope_scaling is None",
        id="scaling against plain",
    ),
    pytest.param(
        {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6, **YARN, "factor": 8.0}},
        "'factor': 8.0",
        id="scaling factor",
    ),
    pytest.param(
        {
            "rope_theta": 1e4,
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "s": {"rope_theta": 2}},
        },
        "in /rope_parameters/full_attention",
        id="by layer type",
    ),
]


@pytest.mark.parametrize(("config", "message"), CONFLICTS)
def test_nested_rope_wins_and_a_disagreement_is_a_warning(config, message):
    found = rope(config)
    assert [(finding.rule, finding.level) for finding in found.conflicts] == [
        ("CONFIG-ROPE-CONFLICT", "warning")
    ]
    assert message in found.conflicts[0].message
    assert found.theta in (None, 1e6)
    assert parse_config(json.dumps(config).encode())[1] == list(found.conflicts)


def test_equal_values_in_both_generations_are_no_conflict():
    config = {"rope_theta": 1_000_000, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert rope({**config, "rope_parameters": {"rope_theta": 1e6, **YARN}}).conflicts == ()


@pytest.mark.parametrize("theta", ["10000", True, -1, 0, [1], {"x": 1}, math.nan, math.inf, 10**400], ids=str)
def test_a_base_that_is_no_positive_number_is_an_error(theta):
    found = rope({"rope_theta": theta})
    assert found.theta is None
    assert [(finding.rule, finding.level) for finding in found.conflicts] == [("CONFIG-PARSE", "error")]
    assert found.conflicts[0].where == "config.json#/rope_theta"


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_settings_that_are_no_object_are_an_error(key):
    found = rope({key: ["yarn"], "rope_theta": 3.0})
    assert found.theta == 3.0
    assert [(finding.rule, finding.where) for finding in found.conflicts] == [
        ("CONFIG-PARSE", f"config.json#/{key}")
    ]
