"""The round loop: draft, verify, accept, roll back, emit. One request, one sequence.

The tokens emitted are those of plain decoding: the target decides every one of them, and a draft only saves a
forward when it equals what the target draws at its position anyway. That is exact for greedy decoding and,
since the target's own draws are used in order, exact in distribution for sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from draftpair.errors import Refused, Usage
from draftpair.runtime.interfaces import Drafter, Target
from draftpair.runtime.sampling import Sampler
from draftpair.runtime.stats import Stats
from draftpair.runtime.tokens import check_ids


@dataclass
class Request:
    """What to generate; ``count`` and ``finish_reason`` tell how far it has come.

    ``finish_reason`` is "stop" when the last token emitted is in ``eos``, "length" after ``max_tokens``.
    """

    prompt: Sequence[int]
    sampler: Sampler
    max_tokens: int
    eos: frozenset[int] = frozenset()
    count: int = 0
    finish_reason: str | None = None

    @property
    def position(self) -> int:
        """Absolute position of the next token to be emitted."""
        return len(self.prompt) + self.count

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.count

    def take(self, tokens: Sequence[int]) -> list[int]:
        """The tokens to emit: up to the first end-of-text token and no more than the budget."""
        kept = list(tokens[: self.remaining])
        stop = next((i for i, token in enumerate(kept) if token in self.eos), None)
        if stop is not None:
            kept = kept[: stop + 1]
        self.count += len(kept)
        if stop is not None:
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return kept


def generate(
    target: Target, drafter: Drafter | None, request: Request, block_size: int, stats: Stats
) -> Iterator[list[int]]:
    """Yield the tokens in groups as they are decided; without a drafter, one by one.

    ``block_size`` counts the rows of a verify block, the bonus token included. ToolError for a prompt token
    outside the vocabulary, Usage for an empty prompt or budget.
    """
    if not request.prompt or request.max_tokens < 1:
        raise Usage("generating needs at least one prompt token and a budget of at least one token")
    check_ids(request.prompt, target.vocab_size, "target")
    with stats.clock("prefill"):
        target.reset()
        logits, hidden = target.prefill(request.prompt)
        _require_numbers(logits)
        first = request.sampler(logits, request.position)
        [bonus] = _ids(first)
    yield _emit(request, [bonus], stats)
    if request.finish_reason is not None:
        return
    if drafter is not None:
        with stats.clock("prefill"):
            drafter.reset()
            drafter.prefill(request.prompt, hidden, bonus)
    del hidden  # a long prompt's hidden states are hundreds of megabytes
    if drafter is None:
        yield from _plain(target, first, request, stats)
    else:
        yield from _speculate(target, drafter, bonus, request, block_size, stats)


def _speculate(
    target: Target,
    drafter: Drafter,
    bonus: int,
    request: Request,
    block_size: int,
    stats: Stats,
) -> Iterator[list[int]]:
    while True:
        width = min(block_size, request.remaining + 1)
        with stats.clock("draft"):
            drafts = drafter.draft(width - 1)
        with stats.clock("verify"):
            logits, hidden = target.verify([bonus, *drafts])
            decided = _ids(request.sampler(logits[0], request.position))
            accepted = _agreeing(drafts, decided)
            target.rollback(len(drafts) - accepted)
        stats.count_round(len(drafts), accepted)
        emitted = _emit(request, decided[: accepted + 1], stats)
        yield emitted
        if request.finish_reason is not None:
            return
        bonus = emitted[-1]
        with stats.clock("draft"):
            drafter.accept(accepted, bonus, hidden)


def _require_numbers(logits: mx.array) -> None:
    """Raise Refused for logits that are NaN: every choice among them would look like one."""
    if mx.isnan(logits).any().item():
        raise Refused(
            "the target's logits are not numbers (NaN): its weights are damaged, or its compute dtype overflows",
            hint="draftpair validate TARGET; with --dtype float16, try float32",
        )


def _plain(target: Target, token: mx.array, request: Request, stats: Stats) -> Iterator[list[int]]:
    """One token a step. The next step is begun before the last token is read, as mlx-lm does."""
    ahead = _step(target, token, request, 0, stats)
    while request.finish_reason is None:
        token = ahead
        if request.remaining > 1:
            ahead = _step(target, token, request, 1, stats)
        with stats.clock("plain"):
            value = _ids(token)
        yield _emit(request, value, stats)


def _step(target: Target, token: mx.array, request: Request, ahead: int, stats: Stats) -> mx.array:
    with stats.clock("plain"):
        drawn = request.sampler(target.decode(token), request.position + ahead)
        mx.async_eval(drawn)
        return drawn


def _emit(request: Request, tokens: Sequence[int], stats: Stats) -> list[int]:
    emitted = request.take(tokens)
    stats.tokens += len(emitted)
    return emitted


def _agreeing(drafts: Sequence[int], decided: Sequence[int]) -> int:
    """Length of the longest prefix of the drafts that the target decided alike."""
    pairs = enumerate(zip(drafts, decided, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), len(drafts))


def _ids(tokens: mx.array) -> list[int]:
    """Waits for the tokens [n]."""
    ids: Any = tokens.tolist()
    return list(ids)
