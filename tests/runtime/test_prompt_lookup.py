"""Prompt lookup: what it finds, when its governor holds it back, and that no token changes by it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import ToolError, Usage
from draftpair.runtime.drafters._prompt_lookup import Drafter, Gated, Graded, Text
from draftpair.runtime.interfaces import Target
from draftpair.runtime.load import load_target
from fixtures.ordinary import write_model
from fixtures.pairs import run

NONE = mx.zeros((1, 0, 0))


def begun(text: Sequence[int], **options: Any) -> Drafter:
    """A drafter that has taken in a text, the last token of it as the bonus."""
    drafter = Drafter(1000, **options)
    drafter.prefill(text[:-1], NONE, text[-1])
    return drafter


def pick(logits: mx.array) -> mx.array:
    raise AssertionError("no logits are drawn from")


def draft(text: Sequence[int], count: int = 100, **options: Any) -> list[int]:
    return begun(text, **options).draft(count, pick)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2, 3]),
        ([1, 2, 3, 4, 9, 8, 2, 3, 5, 7, 1, 2, 3], [4, 9, 8, 2, 3, 5, 7]),  # three tokens before two
        ([8, 2, 3, 4, 7, 2, 3, 5, 6, 2, 3], [5, 6, 2, 3]),  # of two the later
        ([1, 2, 3, 4, 5, 9, 3], []),  # one token is not enough
        ([7, 7, 7, 7], [7]),  # the suffix itself has no follower
        ([1, 2], []),
        ([1], []),
        ([1, 2, 1, 2], [1, 2]),
    ],
)
def test_it_proposes_what_followed_the_longest_suffix_where_it_last_had_a_follower(
    text: list[int], expected: list[int]
) -> None:
    assert draft(text) == expected


def test_it_proposes_no_more_than_asked_and_allowed() -> None:
    text = [*range(30), 0, 1, 2]
    assert draft(text) == [*range(3, 10)]
    assert draft(text, 3) == [3, 4, 5]
    assert draft(text, 0) == []
    assert draft(text, max_draft=20) == [*range(3, 23)]


def test_n_grams_are_as_long_as_wished() -> None:
    text = [1, 2, 3, 4, 5, 9, 8, 4, 6, 7, 2, 3, 4]
    assert draft(text, 1) == [5]
    assert draft(text, 1, ngram_max=1) == [6]  # the smallest is never longer than the longest
    assert draft([5, 1, 9, 1], 1, ngram_min=1) == [9]
    assert draft([5, 1, 9, 1], 1) == []
    assert draft([*range(20), 99, *range(3, 19)], 1, ngram_max=16) == [19]


def test_the_text_grows_by_what_was_accepted() -> None:
    drafter = begun([1, 2, 3, 4, 5, 1, 2, 3])
    assert drafter.draft(4, pick) == [4, 5, 1, 2]
    drafter.accept(1, 6, NONE)
    assert drafter.text.tokens == [1, 2, 3, 4, 5, 1, 2, 3, 4, 6]
    assert drafter.draft(4, pick) == []
    drafter.accept(0, 3, NONE)
    drafter.accept(0, 4, NONE)
    assert drafter.draft(2, pick) == [6, 3]


def test_what_it_finds_is_what_a_search_of_the_whole_text_finds() -> None:
    tokens = [(i * i + i // 3) % 5 for i in range(200)]
    text = Text([3, 2])
    for end in range(1, len(tokens)):
        text.extend(tokens[end - 1 : end])
        assert text.followers(4) == searched(tokens[:end], 4)


def searched(tokens: list[int], count: int) -> list[int]:
    for length in (3, 2):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                return tokens[place : place + count]
    return []


def test_graded_follows_what_was_accepted_of_late() -> None:
    governor = Graded(7)
    budgets = [governor.budget]
    for accepted in (0, 0, 1, 0, 1, 7):
        governor.learn(accepted)
        budgets.append(governor.budget)
    # averages: 7, 3.5, 1.75, 1.375, 0.6875, 0.84375, 3.921875
    assert budgets == [7, 7, 6, 5, 3, 4, 7]
    assert Graded(1).budget == 1


def pause_of(governor: Any) -> int:
    """Rounds until it proposes again."""
    rounds = 0
    while not governor.budget:
        governor.wait(False)
        rounds += 1
    return rounds


def test_graded_pauses_after_three_misses_in_a_row_and_each_time_for_longer() -> None:
    governor, pauses = Graded(7), []
    for _ in range(5):
        for _ in range(3):
            assert governor.budget > 0
            governor.learn(0)
        pauses.append(pause_of(governor))
    assert pauses == [4, 8, 16, 32, 32]
    governor.learn(1)
    for accepted in (0, 0, 1, 0, 0, 0):
        assert governor.budget > 0
        governor.learn(accepted)
    assert pause_of(governor) == 4


def test_gated_proposes_two_until_both_are_right() -> None:
    governor = Gated(7)
    budgets = [governor.budget]
    for accepted in (1, 1, 2, 0, 0, 3, 0, 0, 0):
        governor.learn(accepted)
        budgets.append(governor.budget)
    assert budgets == [2, 2, 2, 7, 7, 7, 7, 7, 7, 0]
    assert Gated(1).budget == 1


def test_gated_is_paused_by_one_miss_on_probation_until_two_predictions_in_a_row_come_true() -> None:
    governor = Gated(7)
    for _ in range(2):  # as strict after the pause as at the start
        governor.learn(0)
        for confirmed in (False, True, False, True):
            governor.wait(confirmed)
            assert governor.budget == 0
        governor.wait(True)
        assert governor.budget == 2
    governor.learn(2)
    assert governor.budget == 7


def play(drafter: Drafter, tokens: Sequence[int], count: int = 7) -> list[int]:
    """The loop against a target that will say these tokens; how many were proposed in each round."""
    drafter.reset()
    drafter.prefill(tokens[:1], NONE, tokens[1])
    proposed, at = [], 2
    while at + count < len(tokens):
        drafts = drafter.draft(count, pick)
        right = next((i for i, token in enumerate(drafts) if token != tokens[at + i]), len(drafts))
        proposed.append(len(drafts))
        drafter.accept(right, tokens[at + right], NONE)
        at += right + 1
    return proposed


MISLEADING = [token for i in range(200) for token in (1, 2, 10 + i)]
"""After 1, 2 comes another token every time."""


def test_a_text_that_misleads_is_left_alone_more_and_more() -> None:
    graded, gated, off = (Drafter(1000, policy=policy) for policy in ("graded", "gated", "off"))
    rounds = {drafter.policy: play(drafter, MISLEADING) for drafter in (graded, gated, off)}
    assert off.report()["paused_rounds"] == 0
    assert off.report()["drafted_rounds"] == sum(count > 0 for count in rounds["off"]) > 150
    assert graded.report()["paused_rounds"] > 300
    assert graded.report()["drafted_rounds"] == sum(count > 0 for count in rounds["graded"]) < 60
    assert rounds["gated"].count(2) == gated.report()["drafted_rounds"] == 1
    assert gated.report()["paused_rounds"] > 400


def test_a_text_that_begins_to_repeat_wakes_the_gated_governor() -> None:
    drafter = Drafter(1000, policy="gated")
    proposed = play(drafter, [*MISLEADING[:60], *[*range(300, 320)] * 10])
    report = drafter.report()
    assert report["policy"] == "gated"
    assert report["shadow_confirmations"] == 2
    assert proposed[-10:] == [7] * 10
    assert report["paused_rounds"] > 10
    drafter.reset()
    assert drafter.report() == {
        "policy": "gated", "drafted_rounds": 0, "paused_rounds": 0, "shadow_confirmations": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram_max": 17}, "n-gram length is 17; expected a number from 1 to 16"),
        ({"ngram_max": 0}, "n-gram length is 0"),
        ({"ngram_min": 0}, "smallest n-gram length is 0"),
        ({"max_draft": 65}, "draft length is 65; expected a number from 1 to 64"),
        ({"max_draft": 0}, "draft length is 0"),
        ({"policy": "bold"}, "policy is 'bold'; expected graded, gated, off"),
    ],
)
def test_numbers_out_of_range_are_wrong_usage(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Usage, match=message):
        Drafter(16, **options)


def test_a_prompt_outside_the_vocabulary_is_told() -> None:
    with pytest.raises(ToolError, match="token id 16 at position 1"):
        Drafter(16).prefill([1, 16], NONE, 2)
    assert (Drafter(16).prompt_rows, Drafter(16).widens) == (0, False)


REPEATING = [3, 10, 1, 8, 15, 4, 9] * 4
RANDOM = [(token * token * 5 + token // 3) % 16 for token in range(30)]


def build(folder: Path, recipe: str, dtype: str = "auto", **options: Any) -> Target:
    return load_target(open_checkpoint(write_model(folder / recipe, recipe, **options)), dtype, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("gemma3_text", "float32")]
)
def test_no_token_differs_from_plain_decoding(tmp_path: Path, recipe: str, dtype: str) -> None:
    target = build(tmp_path, recipe, dtype)
    accepted = 0
    for seed in range(20):
        prompt = [(token + seed) % 16 for token in ([3, 10, 1], REPEATING, RANDOM)[seed % 3]]
        drafter = Drafter(16, ngram_min=1 + seed % 2, policy=("graded", "gated", "off")[seed % 3])
        sampling = {"temperature": 0.8, "top_k": 8, "seed": seed} if seed // 2 % 2 else {}
        outcome = run(target, drafter, prompt, 2 + seed % 7, **sampling)
        assert outcome.stats["draft_error"] is None
        assert outcome.ids == run(target, None, prompt, **sampling).ids, f"seed {seed}"
        accepted += outcome.stats["accepted"]
    assert accepted > 0


@pytest.mark.parametrize("recipe", ["llama", "gemma3_text"])
def test_text_that_repeats_itself_is_guessed(tmp_path: Path, recipe: str) -> None:
    target = build(tmp_path, recipe, lean=1.0, share=0.2)  # token t + 1 after token t, round and round
    outcome = run(target, Drafter(16), [0, 1, 2], 8, tokens=100)
    assert outcome.ids == [token % 16 for token in range(3, 103)]
    assert outcome.stats["draft_acceptance_rate"] > 0.9
    assert outcome.stats["rounds"] < 40
