"""What no config.json of a model holds: numbers that are none, and lists and objects without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.families import family
from draftpair.families.bounds import no_numbers, overlong
from draftpair.families.rules import apply_rules
from draftpair.families.views import canonical
from fixtures.tapped import errors, layer, nested, top, variants, write_drafter

NAN, INFINITY = float("nan"), float("inf")


def test_nan_is_found_anywhere_and_infinity_outside_of_ranges() -> None:
    config = {"a": {"b": [1.0, NAN]}, "c": INFINITY, "time_step_limit": [0.0, INFINITY], "d": -INFINITY}
    assert [pointer for pointer, _ in no_numbers(config)] == ["/c", "/d", "/a/b/1"]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"list": list(range(10_000)), "object": dict.fromkeys(map(str, range(30_000)))}, None),
        ({"quantization_config": {"modules": dict.fromkeys(map(str, range(30_001)))}}, None),
        ({"text": {"list": list(range(10_001))}}, ("/text/list", 10_001, 10_000)),
        (dict.fromkeys(map(str, range(30_001))), ("/", 30_001, 30_000)),
    ],
    ids=["at the bounds", "another packing's", "list", "keys of the root"],
)
def test_what_is_longer_than_any_config_is_found(config: dict[str, Any], found: object) -> None:
    assert overlong(config) == found


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize(
    ("name", "variant", "change", "where"),
    [
        ("dflash", "old_shape", lambda v: top(rms_norm_eps=v), "/rms_norm_eps"),
        ("dflash", "old_shape", lambda v: top(rope_scaling={"factor": v}), "/rope_scaling/factor"),
        ("dflash", "old_shape", lambda v: nested(unheard_of=v), "/dflash_config/unheard_of"),
        (
            "eagle3",
            "speculators_llama",
            lambda v: layer(rms_norm_eps=v),
            "/transformer_layer_config/rms_norm_eps",
        ),
    ],
    ids=["read", "inside another", "not read", "nested"],
)
def test_a_number_that_is_none_is_an_error_where_it_stands(
    tmp_path: Path, name: str, variant: str, change: Any, where: str, value: float
) -> None:
    folder = write_drafter(tmp_path, name, variant, change(value))
    found = errors(folder)
    assert set(found) == {"CONFIG-NUMBER"}
    assert found["CONFIG-NUMBER"].where == f"config.json#{where}"


def test_of_a_config_without_end_nothing_else_is_said(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, "dflash", "new_shape", top(layer_types=[None] * 10_001, hidden_size="x"))
    found = errors(folder)
    assert set(found) == {"CONFIG-LENGTH"}
    assert found["CONFIG-LENGTH"].where == "config.json#/layer_types"
    assert (found["CONFIG-LENGTH"].expected, found["CONFIG-LENGTH"].found) == (10_000, 10_001)


def test_what_is_missing_is_said_to_be_missing() -> None:
    config = variants("dflash")["old_shape"]["config"]
    del config["hidden_size"]
    flat, _ = canonical(family("dflash"), ConfigView(config))
    (found,) = apply_rules(flat.raw, "dflash", "config", "config.json", flat)
    assert (found.rule, "/hidden_size is missing" in found.message) == ("CONFIG-DIMENSION", True)


def test_a_message_shows_the_ends_of_a_long_value_alone() -> None:
    config = variants("dflash")["old_shape"]["config"] | {"hidden_act": "x" * 100_000}
    (found,) = apply_rules(config | {"taps": 2}, "dflash", "config", "config.json")[:1]
    assert len(found.message) < 600
