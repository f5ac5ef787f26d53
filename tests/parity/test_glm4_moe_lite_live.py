"""transformers, asked again, still says what the golden file says, and mlx-lm's target agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.utils import load_model

from fixtures.glm4_moe_lite import Geometry
from fixtures.glm4_moe_lite_copy import Carry, write_copy_pair
from fixtures.goldens import as_array, golden_geometry, load_goldens, rebuild
from fixtures.record_glm4_moe_lite import Head, load_target, record

pytestmark = pytest.mark.parity
GOLDENS = load_goldens()


def assert_same(live: Any, recorded: Any, where: str = "golden") -> None:
    """Equal documents, numbers within 1e-5 (and 1e-6 of their size, for the recorded digits)."""
    if isinstance(recorded, dict):
        assert live.keys() == recorded.keys(), where
        for key in recorded:
            assert_same(live[key], recorded[key], f"{where}.{key}")
    elif isinstance(recorded, list) and not all(isinstance(item, int) for item in recorded):
        np.testing.assert_allclose(as_array(live), as_array(recorded), atol=1e-5, rtol=1e-6, err_msg=where)
    elif isinstance(recorded, float):
        assert live == pytest.approx(recorded, abs=1e-5), where
    else:
        assert live == recorded, where


@pytest.mark.parametrize("name", GOLDENS)
def test_transformers_repeats_the_golden(name: str, tmp_path: Path) -> None:
    golden = GOLDENS[name]
    assert_same(record(golden["seed"], golden_geometry(golden), tmp_path), golden)


@pytest.mark.parametrize("name", GOLDENS)
def test_mlx_lm_target_agrees(name: str, tmp_path: Path) -> None:
    golden = GOLDENS[name]
    mx.set_default_device(mx.cpu)
    model, _ = load_model(rebuild(golden, tmp_path))
    hidden = model.model(mx.array([golden["prompt"]]))
    logits = np.array(model.lm_head(hidden))[0, golden["logit_rows"]]
    np.testing.assert_allclose(np.array(hidden)[0], as_array(golden["target"]["hidden"]), atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits, as_array(golden["target"]["logits"]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("carry", ["pre", "post"])
@torch.no_grad()
def test_transformers_finds_the_copy_head_always_right(carry: Carry, tmp_path: Path) -> None:
    pair = write_copy_pair(tmp_path, carry=carry, dtype="F32")
    layers = Geometry().layers
    text = [3, *pair.continuation(3, 16)]
    model = load_target(tmp_path, layers)
    answer = model(torch.tensor([text[:12]]), output_hidden_states=True)
    assert answer.logits[0].argmax(-1).tolist() == text[1:13]
    head, given, hidden = Head(model, tmp_path, layers), text[1:13], answer.hidden_states[-1]
    for step in range(4):
        logits, before, after = head(given, hidden, 1 if step == 0 else 12 + step)
        rows = text[2:14] if step == 0 else [text[13 + step]]
        assert logits.argmax(-1).tolist() == rows
        given, hidden = rows[-1:], (before if carry == "pre" else after)[:, -1:]
