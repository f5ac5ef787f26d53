"""With a head, the targets of GLM and DeepSeek V3 emit the tokens that they emit without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from fixtures.nextn_copy import write_copy_pair
from fixtures.pairs import load, run

SEEDS = range(20)
CHECKPOINTS = 4
PROMPTS = ([7], [(5 * i + 3) % 15 for i in range(24)])
GREEDY: dict[str, Any] = {}


def sampled(seed: int) -> dict[str, Any]:
    return {"temperature": 1.5, "top_k": 12, "seed": seed}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe_lite", "glm4_moe", "deepseek_v3"])
def test_no_run_differs_from_plain_decoding(tmp_path: Path, family: str) -> None:
    """Blocks of 2 to 8 rows, 40 tokens of a vocabulary of 16, about half of the proposals wrong."""
    pairs = [
        load(
            write_copy_pair(family, tmp_path / str(seed), seed=seed, noise=0.9, vocab=16, layers=2).raw,
            family=f"{family}_mtp",
        )
        for seed in range(CHECKPOINTS)
    ]
    rates: list[float] = []
    texts: dict[tuple[Any, ...], list[int]] = {}
    for seed in SEEDS:
        target, drafter = pairs[seed % CHECKPOINTS]
        prompt, width = PROMPTS[seed // CHECKPOINTS % 2], 2 + seed % 7
        for how in (GREEDY, sampled(seed)):
            key = (seed % CHECKPOINTS, len(prompt), how.get("seed"))
            if key not in texts:
                texts[key] = run(target, None, prompt, **how).ids
            outcome = run(target, drafter, prompt, width, **how)
            assert len(outcome.ids) == 40
            assert outcome.ids == texts[key], f"seed {seed}, width {width}, {how or 'greedy'}"
            rates.append(outcome.stats["draft_acceptance_rate"])
        if seed < CHECKPOINTS:
            steps = generate_step(mx.array(prompt), target.network, max_tokens=40)
            assert [token for token, _ in steps] == texts[seed % CHECKPOINTS, len(prompt), None]
    assert 0.1 < sum(rates) / len(rates) < 0.9
    assert len(set(map(tuple, texts.values()))) > 20
