"""What the glm4_moe_lite target has alone: the hidden state that its drafter is fed can be chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Usage
from draftpair.runtime.interfaces import ALL_ROWS
from draftpair.runtime.load import load_target
from fixtures.glm4_moe_lite import write_target

PROMPT = [1, 2, 3, 5, 8, 13, 21, 34]


def test_the_pre_tap_hands_out_the_input_of_the_final_norm_and_leaves_logits_alone(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    post = load_target(checkpoint, environ={})
    pre = load_target(checkpoint, environ={"MLXCEL_GLM_MTP_HIDDEN_TAP": "pre"})
    prefilled = [target.prefill(PROMPT, ALL_ROWS) for target in (post, pre)]
    verified = [target.verify(PROMPT) for target in (post, pre)]
    for (logits, normed), (same_logits, residual) in (prefilled, verified):
        assert np.array_equal(np.array(logits), np.array(same_logits))
        assert not np.allclose(np.array(normed), np.array(residual), atol=0.1)
        np.testing.assert_allclose(
            np.array(pre.network.model.norm(residual)), np.array(normed), rtol=1e-6, atol=1e-6
        )


def test_an_unknown_tap_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    with pytest.raises(Usage, match=r"MLXCEL_GLM_MTP_HIDDEN_TAP is 'middle'; expected pre or post"):
        load_target(checkpoint, environ={"MLXCEL_GLM_MTP_HIDDEN_TAP": "middle"})
