"""Latent projections and routers, which are no linear modules of MLX, run row by row as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.glm4_moe_lite import MoEGate
from mlx_lm.models.mla import MultiLinear

from draftpair.checkpoint import open_checkpoint
from draftpair.runtime.exactness import gate, probe
from draftpair.runtime.load import load_target
from fixtures.glm4_moe_lite import write_target


@pytest.fixture
def target(tmp_path: Path) -> Any:
    return load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})


@pytest.mark.parametrize(("kind", "axis"), [(MultiLinear, -2), (MoEGate, 1)], ids=["latent", "router"])
def test_what_rounds_by_the_number_of_rows_is_run_on_single_ones(
    target: Any, monkeypatch: pytest.MonkeyPatch, kind: Any, axis: int
) -> None:
    whole = kind.__call__

    def coarse(self: Any, x: mx.array, **options: Any) -> Any:
        """A backend whose kernel for several rows rounds in another way than the one for a single row."""
        out = whole(self, x, **options)
        if x.shape[axis] == 1:
            return out
        return (out[0], out[1] * (1 + 2.0**-20)) if isinstance(out, tuple) else out * (1 + 2.0**-20)

    monkeypatch.setattr(kind, "__call__", coarse)
    assert probe(target, 3).verdict == "inexact"
    decision = gate(target, 3, {})
    assert decision.engage
    assert decision.exactness.detail.startswith("with projections and attention row by row: ")
