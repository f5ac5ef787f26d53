"""Which bits of a seed count, and in which order the filters are applied."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from draftpair.runtime.sampling import Sampler


def drawn(seed: int) -> tuple[int, ...]:
    found: Any = Sampler(16, temperature=1.0, seed=seed)(mx.zeros((32, 16)), 0).tolist()
    return tuple(found)


def test_the_lower_32_bits_of_a_seed_count_and_no_others() -> None:
    seeds = [0, *(1 << bit for bit in range(32))]
    assert len({drawn(seed) for seed in seeds}) == 33
    assert drawn(5 + 2**32) == drawn(5)
    assert drawn(-1) == drawn(2**32 - 1)


def test_top_p_counts_the_tokens_that_top_k_drops() -> None:
    """Of 0.4, 0.3, 0.2 and 0.1 the first three are the 0.75 most likely; of the three alone two would be."""
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]] * 200))
    found: Any = Sampler(4, temperature=1.0, top_p=0.75, top_k=3)(logits, 0)
    assert set(found.tolist()) == {0, 1, 2}


def test_logits_of_16_bits_are_drawn_from_in_float32() -> None:
    logits = mx.random.normal((200, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    sampler = Sampler(64, temperature=0.7, top_p=0.9, min_p=0.02)
    assert mx.array_equal(sampler(logits, 0), sampler(logits.astype(mx.float32), 0))
