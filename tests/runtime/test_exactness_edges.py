"""What the probe compares, at which lengths, and how it leaves the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.runtime.exactness import gate, probe
from draftpair.runtime.load import load_target
from fixtures import glm4_moe
from fixtures.glm4_moe_lite import write_target


def test_a_block_of_another_dtype_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})
    verify = target.verify

    def rounded(tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        logits, hidden = verify(tokens)
        return logits.astype(mx.bfloat16), hidden

    monkeypatch.setattr(target, "verify", rounded)
    found = probe(target, 2)
    assert found.verdict == "inexact"
    assert found.detail.endswith("128 of 128 logit bytes differ")


def test_the_lengths_that_a_target_names_are_probed_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})
    prefill, seen = target.prefill, list[int]()
    monkeypatch.setattr(target, "probe_lengths", (5, 21))
    monkeypatch.setattr(
        target, "prefill", lambda tokens, rows: seen.append(len(tokens)) or prefill(tokens, rows)
    )
    found = probe(target, 2, prompt_tokens=8)
    assert found.verdict == "exact"
    assert found.detail.startswith("4 draws of ")
    assert set(seen) == {8, 21}
    assert seen.count(8) == 3 * seen.count(21)  # the shorter one is not longer than every draw's prompt


def test_a_target_that_no_way_makes_exact_attends_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = load_target(open_checkpoint(glm4_moe.write_checkpoint(tmp_path / "target")), environ={})
    verify = target.verify

    def wrong(tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        logits, hidden = verify(tokens)
        return logits + 1e-3, hidden

    monkeypatch.setattr(target, "verify", wrong)
    assert not target.by_rows
    assert not gate(target, 2, {}).engage
    assert not target.by_rows


def test_on_a_gpu_a_prompt_where_attention_changes_its_kernel_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})
    lengths: list[int] = []
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda tokens, rows: lengths.append(len(tokens)) or prefill(tokens, rows)
    )
    assert probe(target, 2).verdict == "exact"
    assert set(lengths) == {8}
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert probe(target, 2).verdict == "exact"
    assert set(lengths) == {8, 1020}
