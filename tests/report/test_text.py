"""The text reports, whole, of the quickstart pair: a change of wording is seen here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.findings import Finding
from draftpair.report import envelope
from draftpair.report.text import (
    findings_text,
    generate_text,
    inspect_text,
    profile_text,
    split_text,
    validate_text,
)
from draftpair.report.units import bytes_text, count_text
from draftpair.toy import write_toy
from fixtures.glm4_moe_lite import write_target
from fixtures.other_heads import OTHER_HEADS, OtherHead, write_other
from fixtures.weights import write_json, write_safetensors

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart pair in the current folder, so that no report holds a path of this machine."""
    monkeypatch.chdir(tmp_path)
    write_toy(Path("raw"), with_head=True)
    write_toy(Path("target"), with_head=False)
    return tmp_path


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_inspect(toy: Path) -> None:
    report = api.inspect("raw", memory="1GB")
    assert "\n".join(inspect_text(report)) + "\n" == golden("inspect")


def test_inspect_of_a_target_that_does_not_fit(toy: Path) -> None:
    report = api.inspect("target", memory="1MB")
    assert "\n".join(inspect_text(report)) + "\n" == golden("inspect-target")


@pytest.mark.parametrize("layout", OTHER_HEADS.values(), ids=OTHER_HEADS)
def test_inspect_of_a_head_that_is_only_recognised(tmp_path: Path, layout: OtherHead) -> None:
    lines = list(inspect_text(api.inspect(write_other(tmp_path / "raw", layout))))
    assert f"family          {layout.family}" in lines
    (head,) = [line for line in lines if line.startswith("head ")]
    assert head.startswith(f"head            recognised, not split ({layout.family}): ")
    assert f"{len(layout.head)} tensors under {layout.prefix}" in head
    lines = list(inspect_text(api.inspect(write_other(tmp_path / "headless", layout, head=False))))
    assert f"family          {layout.family}" in lines


def test_inspect_of_a_head_of_a_family_without_a_record(tmp_path: Path) -> None:
    values = np.zeros((4, 4), "<f4")
    write_safetensors(tmp_path / "model.safetensors", {"mtp.fc.weight": (values, "F32")})
    write_json(tmp_path / "config.json", {"model_type": "stranger"})
    lines = list(inspect_text(api.inspect(tmp_path)))
    assert "family          no record of this family" in lines
    assert any(line.startswith("head            of a family without a record: 1 tensor ") for line in lines)


@pytest.mark.parametrize(("layers", "words"), [(1, "1 layer"), (3, "3 layers")])
def test_inspect_counts_the_layers_that_are_declared(tmp_path: Path, layers: int, words: str) -> None:
    folder = write_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "num_nextn_predict_layers": layers})
    lines = list(inspect_text(api.inspect(folder)))
    assert f"head            declared ({words}), but no tensor of it is here" in lines


def test_split_and_validate(toy: Path) -> None:
    written = api.split_mtp("raw", "drafter", q_bits=4)
    assert "\n".join(split_text(written)) + "\n" == golden("split-mtp")
    report = api.validate("target", "drafter")
    assert "\n".join(validate_text(report)) + "\n" == golden("validate")


def test_generate_and_profile() -> None:
    stats: dict[str, Any] = {
        "draft_kind": "mtp",
        "block_size": 3,
        "block_size_from": "block_size of the drafter",
        "rounds": 4,
        "proposed": 8,
        "accepted": 5,
        "draft_acceptance_rate": 0.625,
        "mean_acceptance_length": 2.25,
        "acceptance_histogram": {"0": 1, "1": 1, "2": 2},
        "acceptance_by_position": [0.75, 0.5],
        "tokens_per_second": 12.34,
        "prefill_seconds": 0.5,
        "decode_seconds": 1.0,
        "draft_seconds": 0.25,
        "verify_seconds": 0.125,
        "plain_seconds": 0.375,
        "other_seconds": 0.25,
        "effective_block_sizes": {"3": 4},
        "draft_error": None,
        "draft_profile": None,
        "prompt_lookup": None,
    }
    report: dict[str, Any] = {
        "inputs": {"draft_model": "drafter"},
        "tokens": [1, 2, 3],
        "stats": stats,
        "exactness": {"verdict": "exact", "detail": "all logit bytes equal"},
        "findings": [Finding("PAIR-ROPE", "warning", "rotary embedding differs", hint="look").as_dict()],
    }
    assert list(generate_text(report)) == [
        "3 tokens, 12.3 tokens a second",
        "exactness: exact (all logit bytes equal)",
        "4 rounds of block width 3 (block_size of the drafter): 5 of 8 proposals accepted (62.5%), "
        "2.25 tokens a round",
        "warning PAIR-ROPE: rotary embedding differs",
        "        -> look",
    ]
    assert list(profile_text(report)) == [
        "prefill         0.500 s",
        "decode          1.000 s",
        "draft           0.250 s",
        "verify          0.125 s",
        "plain           0.375 s",
        "other           0.250 s",
        "position 1      75.0% accepted",
        "position 2      50.0% accepted",
        "0 accepted      in 1 round",
        "1 accepted      in 1 round",
        "2 accepted      in 2 rounds",
    ]


def test_what_a_generation_was_beyond_its_rounds() -> None:
    stats: dict[str, Any] = {
        "tokens_per_second": None,
        "rounds": 3,
        "block_size": 4,
        "block_size_from": "--draft-block-size",
        "accepted": 0,
        "proposed": 4,
        "draft_acceptance_rate": 0.0,
        "mean_acceptance_length": 1.0,
        "effective_block_sizes": {"1": 1, "3": 2},
        "prompt_lookup": {
            "policy": "graded",
            "drafted_rounds": 2,
            "paused_rounds": 1,
            "shadow_confirmations": 0,
        },
    }
    report: dict[str, Any] = {
        "tokens": [1],
        "stats": stats,
        "exactness": {"verdict": "inexact", "detail": "bytes differ"},
        "findings": [],
    }
    assert list(generate_text(report)) == [
        "1 token",
        "exactness: inexact, so the tokens may differ",
        "3 rounds of block width 4 (--draft-block-size): 0 of 4 proposals accepted (0.0%), "
        "1.00 tokens a round, effective widths 1 (1 round), 3 (2 rounds)",
        "prompt lookup, policy graded: 2 rounds with proposals, 1 paused, 0 of those predicted rightly",
    ]
    declined = {**report, "stats": {**stats, "rounds": 0, "prompt_lookup": None}}
    assert list(generate_text(declined)) == ["1 token", "exactness: inexact, so no draft was made"]


def test_errors_come_before_warnings_and_notes() -> None:
    findings = [Finding(f"R-{level}", level, "text").as_dict() for level in ("note", "warning", "error")]
    assert [line.split()[0] for line in findings_text(findings)] == ["error", "warning", "note"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1 << 20, "1.0 MiB (1,048,576 bytes)"),
        (3 << 30, "3.00 GiB (3,221,225,472 bytes)"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (12_345, "12,345"), (849_399_000, "849.4 M"), (29_943_000_000, "29.9 B")],
)
def test_counts(count: int, text: str) -> None:
    assert count_text(count) == text


def test_an_envelope_holds_no_number_that_json_lacks() -> None:
    body = {"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": None, "e": True}}
    report = envelope("inspect", {"x": math.inf}, body)
    assert report["inputs"] == {"x": "Infinity"}
    assert report["a"] == [1.5, "NaN", ["Infinity"]]
    assert report["b"] == {"c": "-Infinity", "d": None, "e": True}
