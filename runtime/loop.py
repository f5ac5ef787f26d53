"""The round loop: draft, verify, accept, roll back, emit. One request, one sequence.

The tokens emitted are those of plain decoding: the target decides every one of them, and a draft only saves a
forward when it equals what the target draws at its position anyway. That is exact for greedy decoding and,
since the target's own draws are used in order, exact in distribution for sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any

import mlx.core as mx

from draftpair.errors import Refused, ToolError, Usage
from draftpair.runtime.interfaces import Drafter, Target
from draftpair.runtime.libraries import RAISED
from draftpair.runtime.sampling import Picks, Sampler
from draftpair.runtime.stats import Stats
from draftpair.runtime.tokens import check_ids
from draftpair.runtime.width import Controller

log = logging.getLogger(__name__)


@dataclass
class Request:
    """What to generate; ``emitted`` and ``finish_reason`` tell how far it has come.

    ``finish_reason`` is "stop" when the last token emitted is in ``eos``, "length" after ``max_tokens``.
    """

    prompt: Sequence[int]
    sampler: Sampler
    max_tokens: int
    eos: frozenset[int] = frozenset()
    emitted: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def position(self) -> int:
        """Absolute position of the next token to be emitted."""
        return len(self.prompt) + len(self.emitted)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.emitted)

    def picks(self) -> Picks:
        """Draws for the positions from the next one on."""
        return Picks(self.sampler, self.position, self.tail())

    def tail(self, drafts: Sequence[int] = ()) -> mx.array | None:
        """The emitted tokens and ``drafts``, as far back as the sampler's penalties look; None where they do not."""
        memory = self.sampler.memory
        if not memory:
            return None
        return mx.array([*[*self.prompt[-memory:], *self.emitted[-memory:]][-memory:], *drafts], mx.int32)

    def take(self, tokens: Sequence[int]) -> list[int]:
        """The tokens to emit: up to the first end-of-text token and no more than the budget."""
        kept = list(tokens[: self.remaining])
        stop = next((i for i, token in enumerate(kept) if token in self.eos), None)
        if stop is not None:
            kept = kept[: stop + 1]
        self.emitted += kept
        if stop is not None:
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return kept


def generate(
    target: Target, drafter: Drafter | None, request: Request, controller: Controller, stats: Stats
) -> Iterator[list[int]]:
    """Yield the tokens in groups as they are decided; without a drafter, one by one.

    ``controller`` gives each round's rows of a verify block, the bonus token included. A drafter that fails is given
    up, the request is not. ToolError for a prompt token outside the vocabulary, Usage for an empty prompt or budget.
    """
    if not request.prompt or request.max_tokens < 1:
        raise Usage("generating needs at least one prompt token and a budget of at least one token")
    check_ids(request.prompt, target.vocab_size, "target")
    return stats.timed(_groups(target, drafter, request, controller, stats))


def _groups(
    target: Target, drafter: Drafter | None, request: Request, controller: Controller, stats: Stats
) -> Iterator[list[int]]:
    with stats.clock("prefill"):
        target.reset()
        logits, hidden = target.prefill(request.prompt, drafter.prompt_rows if drafter else 0)
        _require_numbers(mx.isnan(logits).any())
        [bonus] = _ids(request.picks()(logits))
    yield _emit(request, [bonus], stats)
    if drafter is not None and request.remaining > 1 and request.finish_reason is None:
        with _drafting("prefill", stats):
            drafter.reset()
            drafter.prefill(request.prompt, hidden, bonus)
        del hidden  # a long prompt's hidden states are hundreds of megabytes
        yield from _speculate(target, drafter, request, controller, stats)
    if request.finish_reason is None:
        yield from _plain(target, request, stats)


def _speculate(
    target: Target, drafter: Drafter, request: Request, controller: Controller, stats: Stats
) -> Iterator[list[int]]:
    """Rounds until one token or none is left to decide, or the drafter fails. The last token is then in no cache."""
    bonus = request.emitted[-1]
    while request.remaining > 1 and stats.draft_error is None:
        started, rows = time.perf_counter(), min(controller.rows(), request.remaining)
        with _drafting("draft", stats):
            drafts = [index(token) for token in drafter.draft(rows - 1, request.picks())][: rows - 1]
            check_ids(drafts, target.vocab_size, "target")
        if stats.draft_error is not None:
            return
        with stats.clock("verify"):
            logits, hidden = target.verify([bonus, *drafts])
            broken, proposed = mx.isnan(logits).any(), len(drafts)
            if drafts and broken.item():
                # A draft that the target makes no numbers of spoils the rows before it, by 0 * NaN in attention.
                target.rollback(len(drafts) + 1)
                drafts = []
                logits, hidden = target.verify([bonus])
                broken = mx.isnan(logits).any()
            _require_numbers(broken)
            decided = _ids(request.sampler(logits[0], request.position, request.tail(drafts)))
            accepted = _agreeing(drafts, decided)
            target.rollback(len(drafts) - accepted)
        stats.count_round(proposed, accepted)
        emitted = _emit(request, decided[: accepted + 1], stats)
        controller.record(rows, accepted + 1, time.perf_counter() - started)
        yield emitted
        if request.finish_reason is not None:
            return
        bonus = emitted[-1]
        with _drafting("draft", stats):
            drafter.accept(accepted, bonus, hidden)


@contextmanager
def _drafting(phase: str, stats: Stats) -> Iterator[None]:
    """Clock what the drafter does; its failure is told in ``stats.draft_error`` and ends the block, not the request."""
    try:
        with stats.clock(phase):
            yield
    except (ToolError, *RAISED) as error:
        stats.draft_error = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning("the drafter failed, decoding goes on without it: %s", stats.draft_error)


def _require_numbers(broken: mx.array) -> None:
    """Raise Refused where logits were NaN: every choice among them would look like one."""
    if broken.item():
        raise Refused(
            "the target's logits are not numbers (NaN): its weights are damaged, or its compute dtype overflows",
            hint="draftpair validate TARGET; with --dtype float16, try float32",
        )


def _plain(target: Target, request: Request, stats: Stats) -> Iterator[list[int]]:
    """One token a step. The next step is begun before the last token is read, as mlx-lm does."""
    picks = request.picks()
    ahead = _step(target, mx.array(request.emitted[-1:]), picks, stats)
    while request.finish_reason is None:
        token, broken = ahead
        if request.remaining > 1:
            ahead = _step(target, token, picks, stats)
        with stats.clock("plain"):
            _require_numbers(broken)
            value = _ids(token)
        yield _emit(request, value, stats)


def _step(target: Target, token: mx.array, picks: Picks, stats: Stats) -> tuple[mx.array, mx.array]:
    """The next token [1], and whether any of its logits is NaN; neither is waited for."""
    with stats.clock("plain"):
        logits = target.decode(token)
        drawn, broken = picks(logits), mx.isnan(logits).any()
        mx.async_eval(drawn, broken)
        return drawn, broken


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
