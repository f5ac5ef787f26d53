"""transformers, asked again, still says what the golden files say, and finds the copy heads right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from fixtures.goldens import NEXTN_RUNS, NEXTN_VARIANTS, as_array, load_goldens
from fixtures.nextn_copy import Carry, write_copy_pair
from fixtures.record_nextn import Head, load_target, record

pytestmark = pytest.mark.parity
GOLDENS = {
    (family, name): golden
    for family, path in NEXTN_RUNS.items()
    for name, golden in load_goldens(path).items()
}


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


@pytest.mark.parametrize(("family", "name"), GOLDENS)
def test_transformers_repeats_the_golden(family: str, name: str, tmp_path: Path) -> None:
    seed, options = NEXTN_VARIANTS[family][name]
    assert_same(record(family, seed, options, tmp_path), GOLDENS[family, name])


@pytest.mark.parametrize("look_back", [False, True], ids=["hidden state", "attention"])
@pytest.mark.parametrize(
    ("family", "carry"),
    [("glm4_moe_lite", "pre"), ("glm4_moe_lite", "post"), ("glm4_moe", "post"), ("deepseek_v3", "post")],
)
@torch.no_grad()
def test_transformers_finds_the_copy_head_always_right(
    family: str, carry: str, look_back: bool, tmp_path: Path
) -> None:
    layers = 2
    options = {"carry": cast(Carry, carry), "look_back": look_back, "layers": layers}
    pair = write_copy_pair(family, tmp_path, **options)
    text = [3, *pair.continuation(3, 16)]
    model = load_target(family, tmp_path, layers)
    answer = model(torch.tensor([text[:12]]), output_hidden_states=True)
    assert answer.logits[0].argmax(-1).tolist() == text[1:13]
    head, given, hidden = Head(family, model, tmp_path, layers), text[1:13], answer.hidden_states[-1]
    first = 1 if look_back else 0  # the first row has none before it to look at
    for step in range(4):
        logits, before, after = head(given, hidden, 1 if step == 0 else 12 + step)
        rows = text[2:14] if step == 0 else [text[13 + step]]
        begin = first if step == 0 else 0
        assert logits.argmax(-1).tolist()[begin:] == rows[begin:]
        given, hidden = rows[-1:], (before if carry == "pre" else after)[:, -1:]
