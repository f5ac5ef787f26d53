"""transformers, asked again, still says what the golden file says of Qwen3.5, and finds the copy heads right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.goldens import as_array
from fixtures.qwen3_5 import Geometry
from fixtures.qwen3_5_copy import write_copy_pair
from fixtures.qwen3_5_golden import golden_geometry, load_goldens
from fixtures.record_qwen3_5 import Head, load_target, record

pytestmark = pytest.mark.parity
GOLDENS = load_goldens()


def assert_same(live: Any, recorded: Any, where: str = "golden") -> None:
    """Equal documents, numbers within 1e-5 (and 1e-6 of their size, for the recorded digits)."""
    if isinstance(recorded, dict):
        assert live.keys() == recorded.keys(), where
        for key in recorded:
            assert_same(live[key], recorded[key], f"{where}.{key}")
    elif isinstance(recorded, list) and not all(isinstance(item, int) for item in recorded):
        assert isinstance(recorded[0], str) == isinstance(live[0], str), where
        if isinstance(recorded[0], str):
            assert live == recorded, where
        else:
            np.testing.assert_allclose(
                as_array(live), as_array(recorded), atol=1e-5, rtol=1e-6, err_msg=where
            )
    else:
        assert live == recorded, where


@pytest.mark.parametrize("name", GOLDENS)
def test_transformers_repeats_the_golden(name: str, tmp_path: Path) -> None:
    golden = GOLDENS[name]
    assert_same(record(golden["seed"], golden_geometry(golden), tmp_path), golden)


@pytest.mark.parametrize("sizes", [{}, {"model_type": "qwen3_5_moe"}], ids=["dense", "experts"])
@torch.no_grad()
def test_transformers_finds_the_copy_head_always_right(sizes: dict[str, Any], tmp_path: Path) -> None:
    pair = write_copy_pair(tmp_path, **sizes)
    geometry = Geometry(vocab=16, **sizes)
    text = [3, *pair.continuation(3, 20)]
    model = load_target(tmp_path, geometry)
    answer = model(torch.tensor([text[:12]]), output_hidden_states=True)
    assert answer.logits[0].argmax(-1).tolist() == text[1:13]
    head, given, hidden = Head(model, tmp_path, 1), text[1:13], answer.hidden_states[-1]
    for step in range(4):
        logits, output = head(given, hidden, 1 if step == 0 else 12 + step)
        proposed = logits.argmax(-1).tolist()
        # The first row of all has none before it, from which half of the answer comes.
        assert proposed[1:] == (text[3:14] if step == 0 else [])
        assert proposed[-1] == text[13 + step]
        given, hidden = proposed[-1:], output[:, -1:]
