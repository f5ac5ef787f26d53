"""What stays float32 when a network is cast to 16 bits, drafters and gated delta nets included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from draftpair.checkpoint import open_checkpoint
from draftpair.runtime import load as loading
from draftpair.runtime.load import load_drafter, load_target
from fixtures import glm4_moe_lite, qwen3_5
from fixtures.pairs import FAMILY, split


def dtypes(model: Any, ending: str) -> set[mx.Dtype]:
    found = dict(tree_flatten(model.network.parameters())).items()
    return {value.dtype for name, value in found if name.endswith(ending)}


def test_a_drafters_router_bias_stays_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw", layers=2)
    target = load_target(open_checkpoint(raw), "bfloat16", environ={})
    drafter = open_checkpoint(split(raw, tmp_path / "drafter"))
    loaded = load_drafter(drafter, FAMILY, target, "bfloat16", environ={})
    assert dtypes(loaded, "e_score_correction_bias") == {mx.float32}
    assert dtypes(loaded, "eh_proj.weight") == {mx.bfloat16}


def test_the_decay_rates_of_a_gated_delta_net_stay_float32(tmp_path: Path) -> None:
    target = load_target(open_checkpoint(qwen3_5.write_checkpoint(tmp_path / "raw")), "bfloat16", environ={})
    assert dtypes(target, "A_log") == {mx.float32}
    assert dtypes(target, "in_proj_qkv.weight") == {mx.bfloat16}
