"""The round loop emits what plain decoding emits, whatever is drafted, at any width, greedy and sampled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from draftpair.errors import ToolError, Usage
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


@pytest.mark.slow
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
    for seed, (target, drafter) in list(zip(SEEDS, random_pairs, strict=True))[:6]:
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


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [(2, {}), (3, {"2": 1}), (4, {"3": 1}), (6, {"5": 1}), (7, {"5": 1}), (8, {"2": 1, "5": 1})],
)
def test_a_block_has_no_more_rows_than_tokens_are_left(
    copying: Copying, tokens: int, widths: dict[str, int]
) -> None:
    """One token came with the prefill. For a single one that is left, a block would draft in vain."""
    written, target, drafter = copying
    outcome = run(target, drafter, START, 5, tokens=tokens)
    assert outcome.stats["effective_block_sizes"] == widths
    assert outcome.ids == written.continuation(5, tokens)


@pytest.mark.parametrize("method", ["reset", "prefill", "draft", "accept"])
@pytest.mark.parametrize(
    "error", [RuntimeError("[matmul] bad shapes"), ToolError("token id 99 is outside")], ids=str
)
def test_a_drafter_that_fails_ends_speculation_and_not_the_request(
    copying: Copying,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    error: Exception,
) -> None:
    written, target, drafter = copying
    real, calls = getattr(drafter, method), [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == (1 if method in ("reset", "prefill") else 3):
            raise error
        return real(*args)

    monkeypatch.setattr(drafter, method, failing)
    outcome = run(target, drafter, START, 4, tokens=30)
    assert outcome.ids == written.continuation(5, 30)
    assert outcome.finish_reason == "length"
    assert outcome.stats["draft_error"] == f"{type(error).__name__}: {error}"
    assert outcome.stats["rounds"] == {"reset": 0, "prefill": 0, "draft": 2, "accept": 3}[method]
    assert [record.message for record in caplog.records] == [
        f"the drafter failed, decoding goes on without it: {type(error).__name__}: {error}"
    ]


@pytest.mark.parametrize("wrong", [-1, 32, 2**31])
def test_a_proposal_outside_the_vocabulary_never_reaches_the_target(
    copying: Copying, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    written, target, drafter = copying
    monkeypatch.setattr(drafter, "draft", lambda count, pick: [3] * (count - 1) + [wrong])
    outcome = run(target, drafter, START, 4, tokens=9)
    assert outcome.ids == written.continuation(5, 9)
    assert f"token id {wrong} at position 2 is outside" in outcome.stats["draft_error"]


def test_an_error_of_the_target_is_not_taken_for_the_drafters(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target, drafter = copying
    monkeypatch.setattr(target, "rollback", lambda rejected: [][1])
    with pytest.raises(IndexError):
        run(target, drafter, START, 4)


def test_drafts_may_be_fewer_than_asked_for_and_none(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, target, drafter = copying
    counts = iter([0, 2, 1, 0, 3])
    monkeypatch.setattr(drafter, "accept", lambda *told: None)

    def draft(count: int, pick: Any) -> list[int]:
        return written.continuation(copied.ids_so_far[-1], next(counts))

    copied = Following(target)
    monkeypatch.setattr(drafter, "draft", draft)
    outcome = run(copied, drafter, START, 4, tokens=12)
    assert outcome.ids == written.continuation(5, 12)
    assert outcome.stats["effective_block_sizes"] == {"1": 2, "2": 1, "3": 1, "4": 1}
    assert outcome.stats["acceptance_by_position"] == [1, 1, 1]


class Following:
    """A target that remembers the first token of its next block: the last one emitted."""

    def __init__(self, target: Target) -> None:
        self._target, self.ids_so_far = target, [4]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def prefill(self, tokens: Any, rows: int) -> Any:
        logits, hidden = self._target.prefill(tokens, rows)
        self.ids_so_far.append(int(mx.argmax(logits).item()))
        return logits, hidden

    def verify(self, tokens: list[int]) -> Any:
        logits, hidden = self._target.verify(tokens)
        self.ids_so_far.append(int(mx.argmax(logits[0, -1]).item()))
        return logits, hidden


PENALTIES: dict[str, Any] = {
    "repetition": {"repetition_penalty": 1.4, "repetition_context_size": 7},
    "presence": {"presence_penalty": 1.5, "presence_context_size": 4},
    "frequency": {"frequency_penalty": 0.8, "frequency_context_size": 30},
    "bias": {"logit_bias": {3: 4.0, 7: -5.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {2: 1.5},
    },
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_and_bias_apply_at_every_position(
    random_pairs: list[tuple[Target, Drafter]], name: str, temperature: float
) -> None:
    accepted = changed = 0
    for seed, (target, drafter) in list(zip(SEEDS, random_pairs, strict=True))[:4]:
        sampling: dict[str, Any] = {"tokens": 24, "temperature": temperature, "seed": seed, **PENALTIES[name]}
        plain = run(target, None, prompt(seed), **sampling)
        outcome = run(target, drafter, prompt(seed), 4, **sampling)
        assert outcome.ids == plain.ids, f"seed {seed}"
        accepted += outcome.stats["accepted"]
        free = run(target, None, prompt(seed), tokens=24, temperature=temperature, seed=seed)
        changed += plain.ids != free.ids
    assert accepted > 0
    assert changed > 0


@pytest.mark.parametrize("name", PENALTIES)
def test_penalised_greedy_ids_are_mlx_lms_own(random_pairs: list[tuple[Target, Drafter]], name: str) -> None:
    """From one token: mlx-lm 0.31 leaves all of a prompt but its last token out of what the penalties see."""
    for seed, (target, _) in list(zip(SEEDS, random_pairs, strict=True))[:3]:
        processors = make_logits_processors(**PENALTIES[name])
        theirs = generate_step(
            mx.array(prompt(seed)[-1:]), target.network, max_tokens=24, logits_processors=processors
        )
        expected = [int(token) for token, _ in theirs]
        assert run(target, None, prompt(seed)[-1:], tokens=24, **PENALTIES[name]).ids == expected


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


@pytest.mark.parametrize("tokens", [40, 38], ids=["blocks to the end", "the last token alone"])
def test_seconds_add_up(copying: Copying, tokens: int) -> None:
    _, target, drafter = copying
    stats = run(target, drafter, START, 4, tokens=tokens).stats
    assert stats["prefill_seconds"] > 0
    phases = sum(stats[f"{phase}_seconds"] for phase in ("draft", "verify", "plain", "other"))
    assert stats["decode_seconds"] == pytest.approx(phases)
    assert (stats["plain_seconds"] > 0) == (tokens == 38)
    assert 0 < stats["other_seconds"] < stats["decode_seconds"] / 4
    assert stats["tokens_per_second"] == pytest.approx((tokens - 1) / stats["decode_seconds"])
    plain = run(target, None, START).stats
    assert plain["draft_seconds"] == plain["verify_seconds"] == 0
    assert plain["tokens_per_second"] == pytest.approx(39 / plain["decode_seconds"])
