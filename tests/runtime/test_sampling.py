"""A draw depends on logits, seed and position alone, and follows the distribution it is drawn from."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from draftpair.errors import Usage
from draftpair.runtime.sampling import Sampler

LOGITS = mx.array(np.random.RandomState(3).standard_normal((6, 16)).astype(np.float32))


def test_greedy_takes_the_likeliest_token_of_each_row() -> None:
    assert Sampler(16)(LOGITS, 0).tolist() == np.array(LOGITS).argmax(axis=1).tolist()


def test_rows_of_a_block_are_drawn_as_single_rows_are() -> None:
    sampler = Sampler(16, temperature=0.8, top_p=0.9, top_k=9, min_p=0.02, seed=7)
    together = sampler(LOGITS, 100).tolist()
    mx.random.seed(999)
    assert together == [sampler(LOGITS[row : row + 1], 100 + row).item() for row in range(6)]


def test_positions_and_seeds_draw_independently() -> None:
    flat = mx.zeros((64, 16))
    draws = [
        tuple(Sampler(16, temperature=1.0, seed=s)(flat, p).tolist()) for s, p in ((0, 0), (0, 64), (1, 0))
    ]
    assert len(set(draws)) == 3
    assert all(len(set(drawn)) > 8 for drawn in draws)


def test_draws_follow_the_distribution() -> None:
    logits = mx.array([0.0, 1.0, 2.0, -1.0])
    count = 4000
    drawn = Sampler(4, temperature=0.5, seed=1)(mx.broadcast_to(logits, (count, 4)), 0)
    expected = np.array(mx.softmax(logits / 0.5))
    shares = np.bincount(np.array(drawn), minlength=4) / count
    np.testing.assert_allclose(shares, expected, atol=4 * np.sqrt(0.25 / count))


def test_a_top_k_of_the_vocabulary_or_more_filters_nothing() -> None:
    unfiltered = Sampler(16, temperature=1.0)(LOGITS, 0).tolist()
    assert Sampler(16, temperature=1.0, top_k=16)(LOGITS, 0).tolist() == unfiltered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected 0"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"temperature": 1e300}, "temperature is 1e"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top-p is 1.5; expected a number from 0 to 1"),
        ({"min_p": -1.0}, "min-p is -1.0"),
        ({"top_k": -1}, "top-k is -1"),
    ],
    ids=str,
)
def test_values_without_meaning_are_wrong_usage(options: dict[str, float], message: str) -> None:
    with pytest.raises(Usage, match=message):
        Sampler(16, **options)
