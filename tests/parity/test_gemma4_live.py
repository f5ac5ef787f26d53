"""transformers, asked again, still says what the golden file says of Gemma 4 pairs, and draftpair agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftpair.runtime.drafters.gemma4_assistant import Drafter
from draftpair.runtime.targets.gemma4 import Target
from fixtures.gemma4_assistant import RUN_GOLDEN, RUN_VARIANTS, write_run_variant
from fixtures.goldens import as_array, load_goldens
from fixtures.pairs import load, run
from fixtures.record_gemma4 import record

pytestmark = pytest.mark.parity
GOLDENS = load_goldens(RUN_GOLDEN)


def assert_same(live: Any, recorded: Any, where: str = "golden") -> None:
    """Equal documents, numbers within 1e-5."""
    if isinstance(recorded, dict):
        assert live.keys() == recorded.keys(), where
        for key in recorded:
            assert_same(live[key], recorded[key], f"{where}.{key}")
    elif isinstance(recorded, list) and isinstance(recorded[0], dict):
        for number, (one, other) in enumerate(zip(live, recorded, strict=True)):
            assert_same(one, other, f"{where}.{number}")
    elif isinstance(recorded, list) and not all(isinstance(item, (int, str)) for item in recorded):
        np.testing.assert_allclose(as_array(live), as_array(recorded), atol=1e-5, err_msg=where)
    else:
        assert live == recorded, where


@pytest.mark.parametrize("name", RUN_VARIANTS)
def test_transformers_repeats_the_golden_and_draftpair_agrees(name: str, tmp_path: Path) -> None:
    live = record(name, tmp_path)
    assert_same(live, GOLDENS[name])
    mx.set_default_device(mx.cpu)
    target, drafter = load(*write_run_variant(name, tmp_path), family="gemma4_assistant", dtype="float32")
    assert isinstance(target, Target)
    assert isinstance(drafter, Drafter)
    target.reset()
    _, hidden = target.prefill(live["prompt"], len(live["prompt"]))
    logits = np.array(target.head(hidden))[0, live["logit_rows"]]
    np.testing.assert_allclose(np.array(hidden)[0], as_array(live["target"]["hidden"]), atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits, as_array(live["target"]["logits"]), atol=1e-4, rtol=0)
    token, carry = mx.array([live["bonus"]]), hidden[:, -1:]
    for step in live["steps"]:
        scores, carry = drafter.step(token, carry, target.shared_kv(), mx.array(target.offset - 1))
        np.testing.assert_allclose(np.array(scores)[0], as_array(step["logits"]), atol=1e-4, rtol=0)
        np.testing.assert_allclose(np.array(carry)[0, 0], as_array(step["carry"]), atol=1e-4, rtol=0)
        token = mx.array([step["token"]])
    for width in range(2, 9):
        assert run(target, drafter, live["prompt"], width, tokens=24).ids == live["greedy_with_assistant"]
