"""A draw depends on logits, seed and position alone, and follows the distribution it is drawn from."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftpair.errors import ToolError
from draftpair.runtime.sampling import Picks, Sampler
from fixtures.weights import Array

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


FILTERS: dict[str, Any] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "all": {"temperature": 0.9, "top_k": 7, "top_p": 0.95, "min_p": 0.02},
}
DRAWS = 50_000


def expected_shares(
    logits: Array, temperature: float, top_k: int = 0, top_p: float = 0, min_p: float = 0
) -> Array:
    """The distribution by its definition: filters on the un-tempered probabilities, then the temperature."""
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares)
    kept = np.ones(len(shares), bool)
    if top_p:
        before = np.cumsum(shares[order]) - shares[order]
        kept[order] &= before < top_p
    if min_p:
        kept &= shares >= min_p * shares.max()
    if top_k:
        kept[order[top_k:]] = False
    tempered = np.where(kept, np.exp(logits / temperature - (logits / temperature).max()), 0)
    return np.asarray(tempered / tempered.sum())


def decide(
    sampler: Sampler, count: int, guess: Array, first: Array, following: Array
) -> list[tuple[int, int, bool]]:
    """So many times two tokens as the round loop decides them, and whether the draft for the first was right.

    A draft, the target's draws at its position and behind it, and another draw in the next round when it was wrong.
    """
    drafts = mx.concatenate([Picks(sampler, 2 * i, None)(guess) for i in range(count)])
    blocks = mx.stack([mx.broadcast_to(first, following[drafts].shape), following[drafts]], axis=1)
    decided = sampler(blocks.reshape(2 * count, -1), 0).reshape(count, 2)
    blocks = mx.stack([blocks[:, 0], following[decided[:, 0]]], axis=1)
    corrected = sampler(blocks.reshape(2 * count, -1), 0).reshape(count, 2)[:, 1].tolist()
    drafts, decided = drafts.tolist(), decided.tolist()
    return [
        (token, bonus if draft == token else again, draft == token)
        for draft, (token, bonus), again in zip(drafts, decided, corrected, strict=True)
    ]


@pytest.mark.slow
def test_a_chi_square_of_50_000_speculative_draws_finds_nothing() -> None:
    """The shares of a first token, and of a second given the first, with a drafter that has other ideas."""
    random = np.random.RandomState(11)
    first, following = random.standard_normal(8), 1.5 * random.standard_normal((8, 8))
    guess = first + 0.5 * random.standard_normal(8)
    arrays = mx.array(guess[None]), mx.array(first[None]), mx.array(following)
    decisions = DRAWS // len(FILTERS)
    for number, options in enumerate(FILTERS.values()):
        counts, agreed = np.zeros((8, 8)), 0
        for part in range(decisions // 500):
            sampler = Sampler(8, seed=1000 * number + part, **options)
            for token, bonus, agrees in decide(sampler, 500, *arrays):
                counts[token, bonus] += 1
                agreed += agrees
        shares = expected_shares(first, **options)
        assert p_value(counts.sum(axis=1), shares) > 1e-3, options
        for token in range(8):
            if counts[token].sum() > 500:
                assert p_value(counts[token], expected_shares(following[token], **options)) > 1e-4, options
        distance = 0.5 * np.abs(shares - expected_shares(guess, **options)).sum()
        assert (1 - distance) / (1 + distance) - 0.015 < agreed / decisions < 1


def p_value(counts: Array, shares: Array) -> float:
    """Of Pearson's chi-square, by the Wilson-Hilferty approximation; 0 when something impossible was drawn."""
    possible = shares > 0
    if counts[~possible].sum():
        return 0.0
    expected = shares[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    if not freedom:
        return 1.0
    spread = 2 / (9 * freedom)
    return float(0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread)))


def test_the_chi_square_sees_a_bias_of_a_hundredth() -> None:
    shares = np.array([0.5, 0.3, 0.2])
    assert p_value(DRAWS * shares, shares) > 0.9
    assert p_value(DRAWS * np.array([0.51, 0.29, 0.2]), shares) < 1e-4
    assert p_value(np.array([10.0, 0, 1]), np.array([0.5, 0.5, 0])) == 0


def test_penalties_look_at_the_text_before_each_row() -> None:
    flat = mx.zeros((3, 8))
    sampler = Sampler(8, presence_penalty=1.0, presence_context_size=2, logit_bias={7: -5.0, 0: 0.5, 1: 0.25})
    # Rows follow [.., 5, 6], [.., 6, 0] and [.., 0, 1]: 0 is best until it stands among the last two.
    assert sampler(flat, 0, mx.array([5, 6, 0, 1])).tolist() == [0, 1, 2]
    assert sampler.memory == 2


def test_a_drafters_narrower_or_wider_rows_are_drawn_with_the_same_noise() -> None:
    sampler = Sampler(16, temperature=1.0, seed=3)
    narrow = mx.where(mx.arange(16) < 12, LOGITS, -mx.inf)
    assert sampler(LOGITS[:, :12], 5).tolist() == sampler(narrow, 5).tolist()
    wide = mx.concatenate([LOGITS, mx.full((6, 4), 50.0)], axis=1)
    assert sampler(wide, 5).tolist() == sampler(LOGITS, 5).tolist()
    assert Sampler(16)(wide, 5).tolist() == Sampler(16)(LOGITS, 5).tolist()


def test_picks_know_what_was_picked_before() -> None:
    picks = Picks(Sampler(8, frequency_penalty=1.0, logit_bias={2: 2.5, 4: 1.0}), 10, mx.array([2], mx.int32))
    flat = mx.zeros((1, 8))
    assert [int(picks(flat).item()) for _ in range(4)] == [2, 4, 2, 0]


def test_a_top_k_of_the_vocabulary_or_more_filters_nothing() -> None:
    unfiltered = Sampler(16, temperature=1.0)(LOGITS, 0).tolist()
    assert Sampler(16, temperature=1.0, top_k=16)(LOGITS, 0).tolist() == unfiltered


@pytest.mark.parametrize("token", [-1, 16])
def test_a_bias_for_a_token_that_is_not_there_is_refused(token: int) -> None:
    with pytest.raises(ToolError, match=f"token id {token} at position 1 is outside"):
        Sampler(16, logit_bias={0: 1.0, token: 1.0})
