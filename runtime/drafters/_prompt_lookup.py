"""Prompt lookup: proposes what followed the last time the text ended as it ends now. No model, no checkpoint.

Texts that repeat themselves or their prompt (edits, summaries, code) are guessed well this way, others not at all;
a governor narrows and pauses the guessing where it does not pay. Defaults and rules are those of mlxcel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from draftpair.errors import Usage
from draftpair.runtime.interfaces import Pick
from draftpair.runtime.options import LONGEST_NGRAM
from draftpair.runtime.tokens import check_ids

MOST_DRAFTS = 64


class Drafter:
    """See ``draftpair.runtime.interfaces.Drafter``; ``vocab_size`` is the target's.

    An n-gram of ``ngram_max`` tokens is looked for first, then shorter ones down to ``ngram_min`` (to ``ngram_max``
    where that is less). At most ``max_draft`` tokens are proposed. ``policy`` is graded, gated or off. Usage for
    numbers out of range.
    """

    prompt_rows = 0
    widens = False

    def __init__(
        self,
        vocab_size: int,
        ngram_max: int = 3,
        ngram_min: int = 2,
        max_draft: int = 7,
        policy: str = "graded",
    ) -> None:
        _require("prompt-lookup n-gram length", ngram_max, LONGEST_NGRAM)
        _require("prompt-lookup smallest n-gram length", ngram_min, LONGEST_NGRAM)
        _require("prompt-lookup draft length", max_draft, MOST_DRAFTS)
        if policy not in POLICIES:
            raise Usage(f"prompt-lookup policy is {policy!r}; expected {', '.join(POLICIES)}")
        self.vocab_size = vocab_size
        self.lengths = range(ngram_max, min(ngram_min, ngram_max) - 1, -1)
        self.max_draft, self.policy = max_draft, policy
        self.reset()

    def reset(self) -> None:
        self.text = Text(self.lengths)
        self.governor: Governor = POLICIES[self.policy](self.max_draft)
        self.drafts: list[int] = []
        self.drafted_rounds = self.paused_rounds = self.shadow_confirmations = 0
        self.shadow: list[int] = []

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        check_ids(prompt, self.vocab_size, "target")
        self.text.extend([*prompt, bonus])

    def draft(self, count: int, pick: Pick) -> list[int]:
        budget = min(count, self.governor.budget)
        self.drafts = self.text.followers(budget)
        self.shadow = [] if budget else self.text.followers(min(count, 1))
        self.drafted_rounds += bool(self.drafts)
        self.paused_rounds += self.governor.budget == 0
        return self.drafts

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        if self.governor.budget == 0:
            confirmed = self.shadow == [bonus]
            self.shadow_confirmations += confirmed
            self.governor.wait(confirmed)
        elif self.drafts:
            self.governor.learn(accepted)
        self.text.extend([*self.drafts[:accepted], bonus])

    def report(self) -> dict[str, Any]:
        """``policy``, and how many rounds drafted, were paused, and predicted rightly while paused."""
        return {
            "policy": self.policy,
            "drafted_rounds": self.drafted_rounds,
            "paused_rounds": self.paused_rounds,
            "shadow_confirmations": self.shadow_confirmations,
        }


class Text:
    """The tokens so far, and for every n-gram that has a follower where it last had one."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length, places in self.places.items():
                if length <= end:
                    places[tuple(self.tokens[end - length :])] = end
            self.tokens.append(token)

    def followers(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest n-gram that the text ends with, where it last had any."""
        for length, places in self.places.items():
            place = places.get(tuple(self.tokens[-length:]))
            if place is not None:
                return self.tokens[place : place + count]
        return []


class Governor(Protocol):
    """Decides how many tokens the next round may propose."""

    @property
    def budget(self) -> int:
        """Tokens to propose at most; 0 while paused."""

    def learn(self, accepted: int) -> None:
        """A round that proposed something had ``accepted`` of it accepted."""

    def wait(self, confirmed: bool) -> None:
        """A paused round has passed; ``confirmed`` says whether the next token was predicted rightly."""


MISSES = 3
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 32


@dataclass
class Graded:
    """As wide as proposals were accepted of late, and some; three misses in a row pause it, each time for longer."""

    most: int
    average: float = field(init=False)
    misses: int = 0
    pause: int = SHORTEST_PAUSE
    paused: int = 0

    def __post_init__(self) -> None:
        self.average = float(self.most)

    @property
    def budget(self) -> int:
        return 0 if self.paused else min(int(2 * self.average + 0.5) + 2, self.most)

    def learn(self, accepted: int) -> None:
        self.average = (self.average + accepted) / 2
        if accepted:
            self.misses, self.pause = 0, SHORTEST_PAUSE
            return
        self.misses += 1
        if self.misses == MISSES:
            self.misses, self.paused = 0, self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def wait(self, confirmed: bool) -> None:
        self.paused -= 1


NARROW = 2
PROVEN = 1.5
UNPROVEN = 2 * PROVEN - NARROW  # from here one narrow block that is accepted whole reaches PROVEN
CONFIRMATIONS = 2


@dataclass
class Gated:
    """Narrow until a narrow block is accepted whole, then full; a pause ends when predictions come true again.

    On probation, at the start and after a pause, one miss pauses it; later three in a row do.
    """

    most: int
    average: float = UNPROVEN
    probation: bool = True
    misses: int = 0
    paused: bool = False
    confirmed: int = 0

    @property
    def budget(self) -> int:
        if self.paused:
            return 0
        return min(NARROW, self.most) if self.probation else self.most

    def learn(self, accepted: int) -> None:
        self.average = (self.average + accepted) / 2
        self.probation = self.probation and self.average < PROVEN
        self.misses = 0 if accepted else self.misses + 1
        self.paused = self.misses >= (1 if self.probation else MISSES)

    def wait(self, confirmed: bool) -> None:
        self.confirmed = self.confirmed + 1 if confirmed else 0
        if self.confirmed == CONFIRMATIONS:
            self.paused, self.probation = False, True
            self.average, self.misses, self.confirmed = UNPROVEN, 0, 0


@dataclass
class Ungoverned:
    """Always as wide as allowed."""

    budget: int

    def learn(self, accepted: int) -> None:
        pass

    def wait(self, confirmed: bool) -> None:
        pass


POLICIES: dict[str, Any] = {"graded": Graded, "gated": Gated, "off": Ungoverned}


def _require(what: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise Usage(f"{what} is {value}; expected a number from 1 to {most}")
