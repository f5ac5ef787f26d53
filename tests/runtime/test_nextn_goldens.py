"""Targets and heads of GLM and DeepSeek V3 against transformers' numbers, as the golden files have them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftpair.runtime.interfaces import ALL_ROWS
from fixtures.goldens import NEXTN_RUNS, as_array, load_goldens, rebuild
from fixtures.pairs import load, run

GOLDENS = {
    f"{family} {name}": golden
    for family, path in NEXTN_RUNS.items()
    for name, golden in load_goldens(path).items()
}
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}

Recorded = tuple[dict[str, Any], Any, Any]


@pytest.fixture(scope="module", params=GOLDENS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    golden = GOLDENS[request.param]
    raw = rebuild(golden, tmp_path_factory.mktemp("golden") / "raw")
    return golden, *load(raw, family=f"{golden['family']}_mtp")


def prefilled(recorded: Recorded) -> mx.array:
    golden, target, drafter = recorded
    target.reset()
    _, hidden = target.prefill(golden["prompt"], ALL_ROWS)
    drafter.reset()
    drafter.prefill(golden["prompt"], hidden, golden["head"]["tokens"][-1])
    states: mx.array = hidden
    return states


def test_target_logits_and_hidden_states_are_those_of_transformers(recorded: Recorded) -> None:
    golden, target, _ = recorded
    logits = np.array(target.network(mx.array([golden["prompt"]])))[0, golden["logit_rows"]]
    np.testing.assert_allclose(logits, as_array(golden["target"]["logits"]), **TOLERANCE)
    target.reset()
    last, hidden = target.prefill(golden["prompt"], ALL_ROWS)
    np.testing.assert_allclose(np.array(hidden)[0], as_array(golden["target"]["hidden"]), **TOLERANCE)
    np.testing.assert_allclose(np.array(last)[0], as_array(golden["target"]["logits"])[-1], **TOLERANCE)


def test_greedy_ids_are_those_of_transformers(recorded: Recorded) -> None:
    golden, target, drafter = recorded
    count = len(golden["greedy"])
    assert run(target, None, golden["prompt"], tokens=count).ids == golden["greedy"]
    for width in (2, 5):
        outcome = run(target, drafter, golden["prompt"], width, tokens=count)
        assert outcome.ids == golden["greedy"] == golden["greedy_with_mtp"]


def test_head_states_and_logits_are_those_of_transformers(recorded: Recorded) -> None:
    golden, _, drafter = recorded
    hidden = prefilled(recorded)
    drafter.reset()
    head = golden["head"]
    before = drafter.forward(mx.array([head["tokens"]]), hidden)
    after = drafter.layer.shared_head_norm(before)
    np.testing.assert_allclose(np.array(before)[0], as_array(head["before_norm"]), **TOLERANCE)
    np.testing.assert_allclose(np.array(after)[0], as_array(head["after_norm"]), **TOLERANCE)
    rows = [np.array(drafter.logits(before[:, row : row + 1]))[0] for row in golden["logit_rows"]]
    np.testing.assert_allclose(rows, as_array(head["logits"]), **TOLERANCE)


@pytest.mark.parametrize("carry", ["pre", "post"])
def test_chained_proposals_are_those_of_transformers(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, carry: str
) -> None:
    golden, _, drafter = recorded
    monkeypatch.setattr(type(drafter), "carry_after_norm", carry == "post")
    prefilled(recorded)
    expected = golden["chain"][carry]
    seen = []

    def pick(logits: mx.array) -> mx.array:
        seen.append(np.array(logits)[0])
        return mx.argmax(logits, axis=-1)

    assert drafter.draft(len(expected["drafts"]), pick) == expected["drafts"]
    np.testing.assert_allclose(seen[1], as_array(expected["second_step"]["logits"]), **TOLERANCE)


def test_the_carry_of_each_family_is_the_one_its_references_take(recorded: Recorded) -> None:
    golden, _, drafter = recorded
    assert drafter.carry_after_norm == (golden["family"] != "glm4_moe_lite")
