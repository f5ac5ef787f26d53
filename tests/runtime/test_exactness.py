"""The probe tells a verify that equals decoding from one that does not, and says where; the gate acts on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Usage
from draftpair.runtime.exactness import gate, probe, probe_ids
from draftpair.runtime.load import load_target
from fixtures.glm4_moe_lite import write_target


@pytest.fixture
def target(tmp_path: Path) -> Any:
    return load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})


def perturb(target: Any, place: tuple[int, int], calls: int | None) -> None:
    """Add the smallest step to one logit of one row, in the ``calls``-th verify block only, or in each."""
    verify, made = target.verify, [0]

    def perturbed(tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        logits, hidden = verify(tokens)
        made[0] += 1
        if calls is None or made[0] == calls:
            logits[0, place[0], place[1]] *= 1 + 2.0**-22
        return logits, hidden

    target.verify = perturbed


@pytest.mark.parametrize("width", [2, 4])
def test_the_adapter_is_exact(target: Any, width: int) -> None:
    found = probe(target, width)
    assert found.verdict == "exact"
    assert f"at widths 1 to {width}:" in found.detail
    assert target.offset == 0


def test_one_bit_in_one_logit_of_a_later_block_is_found(target: Any) -> None:
    perturb(target, place=(1, 7), calls=4 + 3)
    found = probe(target, 2)
    assert found.verdict == "inexact"
    # Third block of two rows, second row: token 5 of the walk.
    assert found.detail == "draw 1 of 3, width 2: position 5: 1 of 256 logit bytes differ"


def test_a_width_that_only_the_end_of_the_budget_uses_is_probed_too(target: Any) -> None:
    perturb(target, place=(2, 0), calls=8 + 2)
    assert "width 3: position 5" in probe(target, 5).detail


def test_a_block_of_the_bonus_token_alone_is_probed_too(target: Any) -> None:
    perturb(target, place=(0, 0), calls=2)
    assert "width 1: position 1" in probe(target, 3).detail


def test_three_different_prompts_are_probed(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, prefill = [], target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda tokens, rows: prompts.append(tuple(tokens)) or prefill(tokens, rows)
    )
    assert probe(target, 2).verdict == "exact"
    assert list(dict.fromkeys(prompts)) == [tuple(probe_ids(draw, 64, 8, 8)[0]) for draw in range(3)]
    assert len(set(prompts)) == 3


def test_a_difference_that_only_the_last_draw_shows_is_found(target: Any) -> None:
    perturb(target, place=(1, 7), calls=3 * 8)
    assert probe(target, 2).detail.startswith("draw 3 of 3, width 2: position 7:")


def test_mlx_lms_own_forward_of_several_rows_is_not_exact(target: Any) -> None:
    """It attends in another way than for a single row: the reason for the adapter's own verify."""
    target.verify = lambda tokens: (target.network(mx.array([tokens]), target.caches), mx.zeros(1))
    assert probe(target, 2).verdict == "inexact"


@pytest.mark.parametrize("width", [0, 1])
def test_without_a_choice_nothing_is_run(target: Any, width: int) -> None:
    assert probe(target, width).verdict == "not_run"
    assert not gate(target, width, {}).engage


def test_the_ids_are_those_of_the_published_procedure() -> None:
    prompt, block = probe_ids(2, 1000, 8, 3)
    assert prompt == [956, 963, 970, 977, 984, 991, 998, 5]
    assert block == [958, 971, 984]


def test_the_gate_declines_an_inexact_pair_and_says_why(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    perturb(target, place=(0, 0), calls=None)
    with caplog.at_level(logging.WARNING):
        decision = gate(target, 2, {})
    assert not decision.engage
    assert decision.exactness.report() == {
        "verdict": "inexact",
        "detail": "draw 1 of 3, width 1: position 0: 1 of 256 logit bytes differ; declined to plain decoding",
    }
    assert "decoding plainly" in caplog.text


@pytest.mark.parametrize(("value", "engaged"), [("1", True), ("yes", True), ("0", False), ("off", False)])
def test_the_environment_can_overrule_the_gate(target: Any, value: str, engaged: bool) -> None:
    perturb(target, place=(0, 0), calls=None)
    decision = gate(target, 2, {"MLXCEL_MTP_ALLOW_INEXACT": value})
    assert decision.engage == engaged
    assert decision.exactness.verdict == "inexact"
    assert ("overridden by MLXCEL_MTP_ALLOW_INEXACT" in decision.exactness.detail) == engaged


def test_the_probes_prompt_can_be_made_longer(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda tokens, rows: lengths.append(len(tokens)) or prefill(tokens, rows)
    )
    gate(target, 2, {"MLXCEL_MTP_PROBE_PROMPT_LEN": "21"})
    assert set(lengths) == {21}


@pytest.mark.parametrize("text", ["0", "-3", "many"])
def test_a_prompt_length_that_is_no_number_of_tokens_is_wrong_usage(target: Any, text: str) -> None:
    with pytest.raises(Usage, match="MLXCEL_MTP_PROBE_PROMPT_LEN"):
        gate(target, 2, {"MLXCEL_MTP_PROBE_PROMPT_LEN": text})
