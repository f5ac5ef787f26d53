"""The round loop emits what plain decoding emits, whatever is drafted, at any width, greedy and sampled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from draftpair.errors import Usage
from draftpair.runtime.interfaces import Drafter, Target
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.glm4_moe_lite_copy import CopyPair, write_copy_pair
from fixtures.pairs import load, run

SEEDS = range(20)
TINY = {"vocab": 16, "hidden": 32, "layers": 2, "kv_lora": 32, "q_lora": 32, "dense": 64, "experts": 4}


@pytest.fixture(scope="module")
def random_pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Target, Drafter]]:
    folder = tmp_path_factory.mktemp("random")
    return [load(write_checkpoint(folder / str(seed), seed=seed, **TINY)) for seed in SEEDS]


def prompt(seed: int) -> list[int]:
    return [(5 * seed + 3 * i * i) % 16 for i in range(6)]


def test_greedy_ids_equal_plain_decoding_for_random_pairs(random_pairs: list[tuple[Target, Drafter]]) -> None:
    rounds: Counter[tuple[int, str]] = Counter()
    for seed, (target, drafter) in zip(SEEDS, random_pairs, strict=True):
        plain = run(target, None, prompt(seed))
        assert len(plain.ids) == 40
        for width in (2, 3, 4, 5):
            outcome = run(target, drafter, prompt(seed), width)
            assert outcome.ids == plain.ids, f"seed {seed}, width {width}"
            for accepted, times in outcome.stats["acceptance_histogram"].items():
                rounds[width, accepted] += times
    for width in (2, 3, 4, 5):
        assert rounds[width, "0"] > 20, "no draft was rejected at once"
        assert rounds[width, "1"] > 20, "no first draft was accepted"
    assert rounds[5, "2"] + rounds[5, "3"] > 0, "no block was accepted in part beyond its first draft"


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "min_p": 0.05}, {"top_k": 4}], ids=str)
def test_sampled_ids_equal_plain_decoding_with_the_same_seed(
    random_pairs: list[tuple[Target, Drafter]], options: dict[str, Any]
) -> None:
    accepted = rejected = 0
    for seed, (target, drafter) in list(zip(SEEDS, random_pairs, strict=True))[: 20 if not options else 3]:
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": seed, "tokens": 24, **options}
        plain = run(target, None, prompt(seed), **sampling)
        outcome = run(target, drafter, prompt(seed), 2 + seed % 4, **sampling)
        assert outcome.ids == plain.ids, f"seed {seed}"
        accepted += outcome.stats["accepted"]
        rejected += outcome.stats["proposed"] - outcome.stats["accepted"]
    assert accepted > 0
    assert rejected > 0


def test_another_seed_draws_other_tokens(random_pairs: list[tuple[Target, Drafter]]) -> None:
    target, _ = random_pairs[0]
    first, again, other = (run(target, None, prompt(0), temperature=1.0, seed=s).ids for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_pair_forgets_the_last_request(random_pairs: list[tuple[Target, Drafter]]) -> None:
    target, drafter = random_pairs[4]
    fresh = run(target, drafter, prompt(4), 3)
    run(target, drafter, [7, 7, 7, 1], 3)
    again = run(target, drafter, prompt(4), 3)
    assert (again.groups, again.stats["accepted"]) == (fresh.groups, fresh.stats["accepted"])


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> tuple[CopyPair, Target, Drafter]:
    """A pair whose every proposal is right."""
    written = write_copy_pair(tmp_path_factory.mktemp("copy") / "raw")
    return written, *load(written.raw)


Copying = tuple[CopyPair, Target, Drafter]
START = [3, 4, 5]


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_a_perfect_drafter_fills_every_block(copying: Copying, width: int) -> None:
    written, target, drafter = copying
    outcome = run(target, drafter, START, width, tokens=1 + 4 * width)
    assert outcome.ids == written.continuation(5, 1 + 4 * width)
    assert [len(group) for group in outcome.groups] == [1] + [width] * 4
    assert outcome.stats["rounds"] == 4
    assert outcome.stats["proposed"] == outcome.stats["accepted"] == 4 * (width - 1)
    assert outcome.stats["draft_acceptance_rate"] == 1
    assert outcome.stats["mean_acceptance_length"] == width
    assert outcome.stats["acceptance_histogram"] == {str(width - 1): 4}
    assert outcome.stats["acceptance_by_position"] == [1] * (width - 1)


@pytest.mark.parametrize("place", [0, 1, 4, 6])
def test_end_of_text_inside_a_block_ends_the_output_with_it(copying: Copying, place: int) -> None:
    written, target, drafter = copying
    expected = written.continuation(5, place + 1)
    for outcome in (
        run(target, None, START, eos={expected[-1]}),
        run(target, drafter, START, 5, eos={expected[-1]}),
    ):
        assert outcome.ids == expected
        assert outcome.finish_reason == "stop"


@pytest.mark.parametrize("budget", [1, 2, 4, 9])
@pytest.mark.parametrize("width", [2, 5])
def test_the_token_budget_is_kept(copying: Copying, width: int, budget: int) -> None:
    written, target, drafter = copying
    for outcome in (
        run(target, None, START, tokens=budget),
        run(target, drafter, START, width, tokens=budget),
    ):
        assert outcome.ids == written.continuation(5, budget)
        assert outcome.finish_reason == "length"


def test_blocks_narrow_when_the_budget_is_smaller_than_the_width(copying: Copying) -> None:
    _, target, drafter = copying
    outcome = run(target, drafter, START, 5, tokens=3)
    # One token came with the prefill; the bonus row and two proposals are all that can still matter.
    assert (outcome.stats["rounds"], outcome.stats["proposed"]) == (1, 2)


def test_a_budget_of_one_needs_no_round(copying: Copying) -> None:
    _, target, drafter = copying
    outcome = run(target, drafter, START, 5, tokens=1)
    assert outcome.stats["rounds"] == 0
    assert outcome.stats["draft_acceptance_rate"] is None
    assert outcome.stats["mean_acceptance_length"] is None
    assert outcome.stats["tokens_per_second"] is None


def test_a_one_token_prompt_works(copying: Copying) -> None:
    written, target, drafter = copying
    outcome = run(target, drafter, [5], 3, tokens=13)
    assert outcome.ids == written.continuation(5, 13)
    assert outcome.stats["draft_acceptance_rate"] == 1


@pytest.mark.parametrize(("given", "budget"), [([], 5), ([1], 0)], ids=["no prompt", "no budget"])
def test_nothing_to_do_is_wrong_usage(copying: Copying, given: list[int], budget: int) -> None:
    with pytest.raises(Usage, match="at least one prompt token and a budget of at least one"):
        run(copying[1], None, given, tokens=budget)


def test_seconds_add_up(copying: Copying) -> None:
    _, target, drafter = copying
    stats = run(target, drafter, START, 4).stats
    assert stats["prefill_seconds"] > 0
    assert stats["decode_seconds"] == pytest.approx(stats["draft_seconds"] + stats["verify_seconds"])
    assert stats["tokens_per_second"] == pytest.approx(39 / stats["decode_seconds"])
    plain = run(target, None, START).stats
    assert plain["draft_seconds"] == plain["verify_seconds"] == 0
    assert plain["tokens_per_second"] == pytest.approx(39 / plain["decode_seconds"])
