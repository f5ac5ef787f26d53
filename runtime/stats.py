"""The numbers of one request: rounds, acceptance, seconds. Seconds are counted only where the host waits anyway."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counted by the round loop; ``report`` gives the ``stats`` object of ``generate``'s JSON.

    Plain decoding leaves ``draft_kind``, ``block_size`` and ``block_size_from`` None and counts no round.
    """

    draft_kind: str | None = None
    block_size: int | None = None
    block_size_from: str | None = None
    tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time of the block to ``<phase>_seconds``: prefill, draft, verify or plain.

        prefill: the prompt through target and drafter, up to the first token. draft: proposing; the forward
        that takes in a verified block is evaluated with the next proposal and counted there. verify: the
        target's block forward, the draws and the rollback. plain: single-token decoding.
        """
        name, started = f"{phase}_seconds", time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)

    def count_round(self, proposed: int, accepted: int) -> None:
        """One verify block: ``accepted`` of ``proposed`` drafts agreed with the target, from the first on."""
        self.rounds[proposed, accepted] += 1

    @property
    def decode_seconds(self) -> float:
        """Everything after the first token."""
        return self.draft_seconds + self.verify_seconds + self.plain_seconds

    def report(self) -> dict[str, Any]:
        """All values; a rate with nothing to divide by is None."""
        rounds = self.rounds.total()
        proposed = sum(offered * times for (offered, _), times in self.rounds.items())
        accepted = sum(agreed * times for (_, agreed), times in self.rounds.items())
        return {
            "draft_kind": self.draft_kind,
            "block_size": self.block_size,
            "block_size_from": self.block_size_from,
            "rounds": rounds,
            "proposed": proposed,
            "accepted": accepted,
            "draft_acceptance_rate": _ratio(accepted, proposed),
            "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
            "acceptance_histogram": self._histogram(),
            "acceptance_by_position": self._by_position(),
            # The first token is the prefill's.
            "tokens_per_second": _ratio(max(0, self.tokens - 1), self.decode_seconds),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
        }

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
