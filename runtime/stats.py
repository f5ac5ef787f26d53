"""The numbers of one request: rounds, acceptance, seconds. Seconds are counted only where the host waits anyway."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Stats:
    """Counted by the round loop; ``report`` gives the ``stats`` object of ``generate``'s JSON.

    Plain decoding leaves ``draft_kind``, ``block_size`` and ``block_size_from`` None and counts no round.
    ``draft_error`` is why the drafter was given up in the middle of a request.
    """

    draft_kind: str | None = None
    block_size: int | None = None
    block_size_from: str | None = None
    tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    total_seconds: float = 0.0
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    draft_error: str | None = None
    draft_profile: dict[str, float] | None = None

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time of the block to ``<phase>_seconds``: prefill, draft, verify or plain.

        prefill: the prompt through target and drafter, up to the first token. draft: taking in the last block's
        outcome and proposing. verify: the target's block forward, the draws and the rollback. plain: single-token
        decoding.
        """
        name, started = f"{phase}_seconds", time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)

    def timed(self, groups: Iterator[T]) -> Iterator[T]:
        """The groups; the time that making them takes, and not what a reader does, is added to ``total_seconds``."""
        while True:
            with self.clock("total"):
                group = next(groups, None)
            if group is None:
                return
            yield group

    def count_round(self, proposed: int, accepted: int) -> None:
        """One verify block: ``accepted`` of ``proposed`` drafts agreed with the target, from the first on."""
        self.rounds[proposed, accepted] += 1

    @property
    def decode_seconds(self) -> float:
        """Everything after the first token."""
        return self.total_seconds - self.prefill_seconds

    @property
    def other_seconds(self) -> float:
        """Decode time in none of the phases: the loop's own."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds - self.plain_seconds)

    def report(self) -> dict[str, Any]:
        """All values; a rate with nothing to divide by is None."""
        rounds = self.rounds.total()
        proposed = sum(offered * times for (offered, _), times in self.rounds.items())
        accepted = sum(agreed * times for (_, agreed), times in self.rounds.items())
        return {
            "draft_kind": self.draft_kind,
            "block_size": self.block_size,
            "block_size_from": self.block_size_from,
            "effective_block_sizes": self._widths(),
            "rounds": rounds,
            "proposed": proposed,
            "accepted": accepted,
            "draft_acceptance_rate": _ratio(accepted, proposed),
            "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
            "acceptance_histogram": self._histogram(),
            "acceptance_by_position": self._by_position(),
            # The first token is the prefill's.
            "tokens_per_second": _ratio(self.tokens - 1, self.decode_seconds) if self.tokens > 1 else None,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
            "draft_error": self.draft_error,
            "draft_profile": self.draft_profile,
        }

    def _widths(self) -> dict[str, int]:
        """Rows of a verify block -> number of rounds with so many; fewer than ``block_size`` near the budget's end."""
        counts: Counter[int] = Counter()
        for (proposed, _), times in self.rounds.items():
            counts[proposed + 1] += times
        return {str(rows): counts[rows] for rows in sorted(counts)}

    def _histogram(self) -> dict[str, int]:
        """Number of accepted drafts -> number of rounds with so many."""
        counts: Counter[int] = Counter()
        for (_, accepted), times in self.rounds.items():
            counts[accepted] += times
        return {str(accepted): counts[accepted] for accepted in sorted(counts)}

    def _by_position(self) -> list[float]:
        """Of the rounds that proposed a draft at position i, the share that accepted it."""
        widest = max((proposed for proposed, _ in self.rounds), default=0)
        shares = []
        for position in range(widest):
            offered = sum(times for (proposed, _), times in self.rounds.items() if proposed > position)
            agreed = sum(times for (_, accepted), times in self.rounds.items() if accepted > position)
            shares.append(agreed / offered)
        return shares


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
