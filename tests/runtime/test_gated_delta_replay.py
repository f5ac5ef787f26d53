"""Rows taken back from a gated delta net where the rule runs in one kernel: it is replayed over those that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.runtime.load import load_target
from draftpair.runtime.targets import _gated_delta
from fixtures.qwen3_5 import write_checkpoint

PROMPT, BLOCK, NEXT = [3, 1, 4, 1, 5], [9, 2, 6, 5], 8


@pytest.mark.parametrize("rejected", range(len(BLOCK) + 1))
@pytest.mark.parametrize("kernel", [False, True], ids=["kept states", "replayed rule"])
def test_the_next_token_sees_the_rows_that_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool, rejected: int
) -> None:
    target: Any = load_target(open_checkpoint(write_checkpoint(tmp_path / "raw")), environ={})
    kept = BLOCK[: len(BLOCK) - rejected]
    target.prefill(PROMPT, 0)
    for token in kept:
        target.decode(mx.array([token]))
    expected = target.decode(mx.array([NEXT]))
    monkeypatch.setattr(_gated_delta, "_has_kernel", lambda layer: kernel)
    target.reset()
    target.prefill(PROMPT, 0)
    target.verify(BLOCK)
    target.rollback(rejected)
    assert target.offset == len(PROMPT) + len(kept)
    assert mx.array_equal(target.decode(mx.array([NEXT])), expected)
