"""An ordinary model as a drafter: no token changes, a copy is always right, and its caches hold what was emitted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.runtime.drafters.full_model import Drafter
from draftpair.runtime.interfaces import Pick, Target
from draftpair.runtime.load import load_drafter, load_target
from draftpair.runtime.window import WindowCache
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.ordinary import write_model, write_quantized
from fixtures.pairs import load, run, split
from fixtures.tapped import variants, write_drafter
from fixtures.weights import write_json

FAMILY = "full_model"
SHORT, LONG = [3, 10, 1, 8, 15], [(7 * i + 3) % 16 for i in range(30)]
WIDTHS = range(2, 9)

Pair = tuple[Target, Any]


def pair(folder: Path, target: str, drafter: str, dtype: str = "auto", seed: int = 1, **options: Any) -> Pair:
    """A target of seed 0 and a drafter of another one."""
    paths = write_model(folder / "target", target), write_model(folder / "drafter", drafter, seed, **options)
    return load(*paths, family=FAMILY, dtype=dtype)


def copy(folder: Path, recipe: str, dtype: str = "auto") -> Pair:
    path = write_model(folder / "model", recipe)
    return load(path, path, family=FAMILY, dtype=dtype)


def packed_copy(folder: Path, recipe: str) -> Pair:
    path = write_model(folder / "model", recipe)
    return load(path, write_quantized(path, folder / "packed", group_size=32), family=FAMILY)


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "llama, another llama": lambda folder: pair(folder, "llama", "llama"),
    "llama, its 4-bit copy": lambda folder: packed_copy(folder, "llama"),
    "qwen3, a llama, bfloat16": lambda folder: pair(folder, "qwen3", "llama", "bfloat16"),
    "qwen3_moe, a qwen3": lambda folder: pair(folder, "qwen3_moe", "qwen3"),
    "gemma3, another gemma3": lambda folder: pair(folder, "gemma3_text", "gemma3_text"),
    "gemma3, another gemma3, bfloat16": lambda folder: pair(folder, "gemma3_text", "gemma3_text", "bfloat16"),
    "gemma3, its 4-bit copy": lambda folder: packed_copy(folder, "gemma3_text"),
}


@pytest.mark.slow
@pytest.mark.parametrize("made", PAIRS.values(), ids=PAIRS.keys())
def test_no_token_differs_from_plain_decoding(tmp_path: Path, made: Callable[[Path], Pair]) -> None:
    target, drafter = made(tmp_path)
    rates = set()
    for seed in range(20):
        prompt = [(token + seed) % 16 for token in (SHORT, LONG)[seed % 2]]
        width = WIDTHS[seed % len(WIDTHS)]
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": seed} if seed // 2 % 2 else {}
        outcome = run(target, drafter, prompt, width, **sampling)
        assert outcome.stats["draft_error"] is None
        assert outcome.ids == run(target, None, prompt, **sampling).ids, f"seed {seed}, width {width}"
        rates.add(outcome.stats["draft_acceptance_rate"])
    assert max(rates) > 0  # of what is never accepted, nothing could go wrong
    assert min(rates) < 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("recipe", ["llama", "qwen3", "gemma3_text"])
def test_a_copy_of_the_target_is_always_right(tmp_path: Path, recipe: str, sampling: dict[str, Any]) -> None:
    target, drafter = copy(tmp_path, recipe)
    expected = run(target, None, SHORT, tokens=100, **sampling).ids
    for width in WIDTHS:
        outcome = run(target, drafter, SHORT, width, tokens=100, **sampling)
        assert outcome.stats["draft_acceptance_rate"] == 1, f"width {width}"
        assert outcome.ids == expected


def keep_what_was_rejected(drafter: Any) -> None:
    drafter.model.rollback = lambda rejected: None


def forget_one_too_many(drafter: Any) -> None:
    rollback = drafter.model.rollback
    drafter.model.rollback = lambda rejected: rollback(rejected + 1)


def forget_the_last_draft(drafter: Any) -> None:
    accept = drafter.accept

    def mutated(accepted: int, bonus: int, hidden: mx.array) -> None:
        accept(accepted, bonus, hidden)
        drafter.pending = drafter.pending[-1:]

    drafter.accept = mutated


def forget_the_prompt(drafter: Any) -> None:
    prefill = drafter.prefill
    drafter.prefill = lambda prompt, hidden, bonus: prefill(prompt[-1:], hidden, bonus)


def miss_the_bonus(drafter: Any) -> None:
    accept = drafter.accept
    drafter.accept = lambda accepted, bonus, hidden: accept(accepted, (bonus + 1) % 16, hidden)


MUTATIONS = {
    "rejected tokens stay": keep_what_was_rejected,
    "one token too many is taken back": forget_one_too_many,
    "the last of only right drafts is not replayed": forget_the_last_draft,
    "the prompt is not read": forget_the_prompt,
    "another bonus token is read": miss_the_bonus,
}


class Disturbed:
    """The drafter, the first proposal of every second round made wrong; ``rate`` is the acceptance of the others."""

    prompt_rows, widens = 0, False

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.round = self.proposed = self.accepted = 0
        self.reset, self.prefill = drafter.reset, drafter.prefill

    def draft(self, count: int, pick: Pick) -> list[int]:
        self.round += 1
        calls = 0

        def spoiled(logits: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            return (pick(logits) + (calls == 1)) % 16

        return list(self.drafter.draft(count, pick if self.round % 2 else spoiled))

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        if self.round % 2:
            self.proposed += len(self.drafter.drafts)
            self.accepted += accepted
        self.drafter.accept(accepted, bonus, hidden)

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed


@pytest.fixture
def sensitive(tmp_path: Path) -> Pair:
    """A model whose layers decide the next token, rather than the last token alone; and a copy of it."""
    path = write_model(tmp_path / "model", seed=1, lean=0.0, share=10.0)
    return load(path, path, family=FAMILY)


def test_undisturbed_rounds_between_disturbed_ones_are_always_right(sensitive: Pair) -> None:
    target, drafter = sensitive
    disturbed = Disturbed(drafter)
    assert run(target, disturbed, LONG, 4, tokens=80).ids == run(target, None, LONG, tokens=80).ids
    assert disturbed.rate == 1


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_any_wrong_turn_costs_acceptance_and_no_token(sensitive: Pair, mutate: Callable[[Any], None]) -> None:
    target, drafter = sensitive
    mutate(drafter)
    disturbed = Disturbed(drafter)
    outcome = run(target, disturbed, LONG, 4, tokens=80)
    assert outcome.ids == run(target, None, LONG, tokens=80).ids
    assert outcome.stats["draft_error"] is None
    assert disturbed.rate < 0.7


def rows(cache: Any) -> list[Any]:
    """What the next token would see of a cache."""
    if isinstance(cache, WindowCache):
        return [np.array(part) for part in cache.visible()]
    return [np.array(part[:, :, : cache.offset]) for part in (cache.keys, cache.values)]


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("recipe", ["llama", "gemma3_text"])
def test_after_every_round_the_caches_are_those_of_a_prefill_of_the_same_text(
    tmp_path: Path, recipe: str, width: int
) -> None:
    target, drafter = packed_copy(tmp_path, recipe)
    other: Any = load_drafter(open_checkpoint(tmp_path / "packed"), FAMILY, target, environ={})
    accept, text, outcomes = drafter.accept, [], set()

    def checked(accepted: int, bonus: int, hidden: mx.array) -> None:
        proposed = list(drafter.drafts)
        accept(accepted, bonus, hidden)
        text.extend([*proposed[:accepted], bonus])
        outcomes.add("all" if accepted == len(proposed) else "some" if accepted else "none")
        # one token is not resident, and another where no draft was wrong
        pending = 1 if accepted < len(proposed) else 2
        assert drafter.pending == text[-pending:]
        other.reset()
        other.model.prefill(text[:-pending], 0)
        assert drafter.model.offset == other.model.offset == len(text) - pending
        for mine, fresh in zip(drafter.model.caches, other.model.caches, strict=True):
            for part, expected in zip(rows(mine), rows(fresh), strict=True):
                np.testing.assert_allclose(part, expected, rtol=0, atol=1e-5)

    drafter.accept = checked
    first = run(target, None, LONG, tokens=1).ids
    text.extend([*LONG, *first])
    run(target, drafter, LONG, width, tokens=60)
    assert "all" in outcomes
    assert outcomes & {"some", "none"}


def test_a_round_that_asks_for_nothing_leaves_more_to_read_in_the_next(tmp_path: Path) -> None:
    target, drafter = copy(tmp_path, "llama")
    expected = run(target, None, SHORT, tokens=5).ids
    drafter.reset()
    drafter.prefill(SHORT, mx.zeros((1, 0, 0)), expected[0])
    assert drafter.draft(0, greedy) == []
    drafter.accept(0, expected[1], mx.zeros((1, 1, 0)))
    assert drafter.draft(3, greedy) == expected[2:]
    assert drafter.model.offset == len(SHORT) + 2 + 2


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "target")


def test_padding_rows_are_no_larger_vocabulary_and_are_never_proposed(tmp_path: Path, model: Path) -> None:
    padded = write_model(tmp_path / "padded", vocab=24, tokenizer=16, seed=1)
    target, drafter = load(model, padded, family=FAMILY)
    assert (drafter.vocab_size, drafter.used) == (24, 16)
    drafter.prefill(SHORT, mx.zeros((1, 0, 0)), 4)
    widths = []

    def pick(logits: mx.array) -> mx.array:
        widths.append(logits.shape)
        return greedy(logits)

    assert max(drafter.draft(5, pick)) < 16
    assert widths == [(1, 16)] * 5
    assert run(target, drafter, SHORT, 4).ids == run(target, None, SHORT).ids


def test_a_larger_vocabulary_is_refused(tmp_path: Path, model: Path) -> None:
    larger = write_model(tmp_path / "larger", vocab=24)
    with pytest.raises(Refused, match="vocabulary has 24 entries, the target's 16"):
        load(model, larger, family=FAMILY)
    (larger / "tokenizer.json").unlink()  # nothing says that any row is padding
    (larger / "tokenizer_config.json").unlink()
    with pytest.raises(Refused, match="vocabulary has 24 entries, the target's 16"):
        load(model, larger, family=FAMILY)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_token_that_a_smaller_vocabulary_lacks_ends_speculation_and_not_the_text(
    tmp_path: Path, model: Path, sampling: dict[str, Any]
) -> None:
    target, drafter = load(model, write_model(tmp_path / "smaller", vocab=12, seed=1), family=FAMILY)
    prompt = [token for token in LONG if token < 12]
    plain = run(target, None, prompt, **sampling)
    assert max(plain.ids) >= 12
    outcome = run(target, drafter, prompt, 4, **sampling)
    assert outcome.ids == plain.ids
    assert "outside the drafter's vocabulary of 12 entries" in outcome.stats["draft_error"]
    with pytest.raises(ToolError, match="token id 12 at position 1 is outside the drafter's vocabulary"):
        drafter.prefill([1, 12], mx.zeros((1, 0, 0)), 3)


def test_a_draw_outside_a_smaller_vocabulary_is_not_fed_back(tmp_path: Path, model: Path) -> None:
    _, drafter = load(model, write_model(tmp_path / "smaller", vocab=12), family=FAMILY)
    fed, extend = [], drafter.model.extend
    drafter.model.extend = lambda ids: (fed.extend(ids[0].tolist()), extend(ids))[1]
    drafter.prefill(SHORT[:1], mx.zeros((1, 0, 0)), 3)
    assert drafter.draft(3, lambda logits: mx.array([15])) == [15, 15, 15]
    assert max(fed) == 11


@pytest.mark.parametrize("edit", [{"vocab_size": None}, {"vocab_size": "16"}, {"vocab_size": 0}])
def test_a_config_without_a_vocabulary_size_is_refused(model: Path, edit: dict[str, Any]) -> None:
    write_json(model / "config.json", open_checkpoint(model).config.raw | edit)
    with pytest.raises(Refused, match="vocab_size"):
        Drafter.load(open_checkpoint(model), {})


def test_a_model_whose_caches_cannot_roll_back_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    hybrid = write_model(tmp_path / "hybrid", "jamba")
    with pytest.raises(Refused, match=r"hybrid cannot draft: cache 0 of 2 is mlx-lm's ArraysCache"):
        load(model, hybrid, family=FAMILY)


def test_a_block_drafter_given_as_a_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", "dflash", next(iter(variants("dflash"))))
    with pytest.raises(Refused, match=r"no ordinary model but a drafter: .*\(dflash\)"):
        Drafter.load(open_checkpoint(folder), {})


def test_a_head_given_as_a_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = split(write_checkpoint(tmp_path / "raw", tokenizer=False), tmp_path / "head")
    with pytest.raises(Refused, match=r"no ordinary model but a drafter: .*\(glm4_moe_lite_mtp\)"):
        Drafter.load(open_checkpoint(folder), {})


def test_a_folder_without_a_whole_model_is_refused(tmp_path: Path, model: Path) -> None:
    other = shutil.copytree(model, tmp_path / "part")
    weights: Any = mx.load(str(other / "model.safetensors"))
    del weights["model.embed_tokens.weight"]
    mx.save_safetensors(str(other / "model.safetensors"), weights)
    with pytest.raises(Refused, match="no whole model"):
        Drafter.load(open_checkpoint(other), {})


def test_it_wants_no_hidden_states_and_no_wider_blocks(model: Path) -> None:
    drafter = Drafter.load(open_checkpoint(model), {})
    assert (drafter.prompt_rows, drafter.widens, drafter.vocab_size) == (0, False, 16)
    target: Any = load_target(open_checkpoint(model), environ={})
    drafter.bind(target)
    assert drafter.network is drafter.model.network
