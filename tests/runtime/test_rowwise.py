"""Row by row, a verify block takes the kernels of single-token decoding, where a block takes others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.checkpoint import open_checkpoint
from draftpair.runtime import exactness
from draftpair.runtime.exactness import gate, probe
from draftpair.runtime.load import load_target
from draftpair.runtime.rowwise import RowWise, _attention_by_rows
from fixtures import gemma4_assistant, glm4_moe, qwen3_5
from fixtures.glm4_moe_lite import write_target
from fixtures.pairs import run

WRITERS: dict[str, Callable[[Path], Path]] = {
    "glm4_moe": glm4_moe.write_checkpoint,
    "qwen3_5": qwen3_5.write_checkpoint,
    "gemma4": gemma4_assistant.write_target,
}


@pytest.fixture
def target(tmp_path: Path) -> Any:
    return load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})


def coarse(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose kernel for several rows rounds differently from the one for a single row."""
    whole = kind.__call__

    def call(self: Any, x: mx.array, *others: mx.array) -> mx.array:
        out = whole(self, x, *others)
        return out * (1 + 2.0**-20) if x.shape[-2 if kind is nn.Linear else 1] > 1 else out

    monkeypatch.setattr(kind, "__call__", call)


@pytest.mark.parametrize("kind", [nn.Linear, SwitchGLU], ids=lambda kind: kind.__name__)
def test_projections_that_depend_on_the_rows_are_found_and_avoided(
    target: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    coarse(kind, monkeypatch)
    assert probe(target, 3).verdict == "inexact"
    with caplog.at_level(logging.WARNING):
        decision = gate(target, 3, {})
    assert decision.engage
    words = "with projections and attention row by row"
    expected = (
        f"{words}: 3 draws of 4 blocks at widths 1 to 3: all logit bytes equal; as a block, draw 1 of 3"
    )
    assert decision.exactness.detail.startswith(expected)
    assert f"verifying {words}, which is exact and slower" in caplog.text
    plain = run(target, None, [1, 2, 3], tokens=24)
    assert run(decision.target, Repeating(), [1, 2, 3], 3, tokens=24).ids == plain.ids


@pytest.mark.parametrize("model", ["glm4_moe", "qwen3_5", "gemma4"])
def test_attention_that_depends_on_the_rows_is_avoided_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Where the projections are exact, only attention pays for it."""
    whole = mx.fast.scaled_dot_product_attention

    def attend(q: mx.array, *others: Any, **options: Any) -> mx.array:
        return whole(q, *others, **options) * (1 + 2.0**-20 if q.shape[2] > 1 else 1)

    target = load_target(open_checkpoint(WRITERS[model](tmp_path / "target")), environ={})
    assert probe(target, 3).verdict == "exact"
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    decision = gate(target, 3, {})
    assert decision.exactness.detail.startswith("with attention row by row: ")
    assert decision.target is target
    plain = run(target, None, [1, 2, 3], tokens=24)
    assert run(target, Repeating(), [1, 2, 3], 3, tokens=24).ids == plain.ids


class Repeating:
    """Proposes the bonus token again."""

    prompt_rows, widens = 0, False

    def reset(self) -> None:
        self.bonus = 0

    def prefill(self, prompt: Any, hidden: mx.array, bonus: int) -> None:
        self.bonus = bonus

    def draft(self, count: int, pick: Any) -> list[int]:
        return [self.bonus] * count

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        self.bonus = bonus


def test_a_target_that_is_inexact_row_by_row_too_is_left_as_it_was(target: Any) -> None:
    verify, classes = target.verify, [type(module) for module in target.network.modules()]

    def wrong(tokens: Any) -> Any:
        logits, hidden = verify(tokens)
        return logits + 1e-3, hidden

    target.verify = wrong
    decision = gate(target, 2, {})
    assert not decision.engage
    assert decision.target is target
    assert [type(module) for module in target.network.modules()] == classes


def test_only_verify_runs_row_by_row(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    call = nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: rows.append(x.shape[-2]) or call(self, x))
    slow = RowWise(target)
    slow.prefill([1, 2, 3, 4], 0)
    assert max(rows) == 3
    rows.clear()
    slow.verify([5, 6, 7])
    assert max(rows) == 1
    assert slow.undo() is target
    rows.clear()
    target.verify([5, 6, 7])
    assert max(rows) == 3


def test_row_by_row_gives_the_same_numbers(target: Any) -> None:
    target.prefill([1, 2, 3, 4], 0)
    expected = target.verify([5, 6, 7])
    target.rollback(3)
    for found, wanted in zip(RowWise(target).verify([5, 6, 7]), expected, strict=True):
        assert mx.array_equal(found, wanted)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_causal_attention_is_made_of_single_queries(heads: tuple[int, int]) -> None:
    mx.random.seed(1)
    q = mx.random.normal((1, heads[0], 3, 8))
    k, v = mx.random.normal((1, heads[1], 7, 8)), mx.random.normal((1, heads[1], 7, 8))
    attend = mx.fast.scaled_dot_product_attention
    expected = [attend(q[:, :, i : i + 1], k[:, :, : 5 + i], v[:, :, : 5 + i], scale=0.3) for i in range(3)]
    with _attention_by_rows():
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")
        free = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3)
    assert mx.array_equal(found, mx.concatenate(expected, axis=2))
    assert mx.array_equal(free, attend(q, k, v, scale=0.3))
    assert mx.fast.scaled_dot_product_attention is attend


def test_the_gate_asks_once_a_process(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "_found", {})
    asked: list[int] = []
    real = exactness.probe

    def counted(target: Any, block_size: int, prompt_tokens: int = 8) -> Any:
        asked.append(block_size)
        return real(target, block_size, prompt_tokens)

    monkeypatch.setattr(exactness, "probe", counted)
    key = ("glm4_moe_lite_mtp", "a model", "float32")
    first, again = gate(target, 3, {}, key), gate(target, 3, {}, key)
    assert asked == [3]
    assert first.exactness == again.exactness
    gate(target, 2, {}, key)
    gate(target, 3, {}, ("glm4_moe_lite_mtp", "another", "float32"))
    gate(target, 3, {"MLXCEL_MTP_PROBE_PROMPT_LEN": "9"}, key)
    gate(target, 3, {})
    assert asked == [3, 2, 3, 3, 3]
