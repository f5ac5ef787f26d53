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

        prefill: the prompt through the target, up to the first token, and then through the drafter. draft: taking in
        the last block's outcome and proposing. verify: the target's block forward, the draws and the rollback. plain:
        single-token decoding.
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
        """Everything after the prompt: the drafter takes it in after the first token, and that does not count here."""
        return self.total_seconds - self.prefill_seconds

    @property
    def other_seconds(self) -> float:
        """Decode time in none of the phases: the loop's own."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds - self.plain_seconds)

    def report(self) -> dict[str, Any]:
        """All values; a rate with nothing to divide by is None."""
        widths, histogram = Counter[int](), Counter[int]()
        for (proposed, accepted), times in self.rounds.items():
            widths[proposed + 1] += times
            histogram[accepted] += times
        return {
            "draft_kind": self.draft_kind,
            "block_size": self.block_size,
            "block_size_from": self.block_size_from,
            **acceptance(widths, histogram),
            # The first token is the prefill's.
            "tokens_per_second": _ratio(self.tokens - 1, self.decode_seconds) if self.tokens > 1 else None,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "plain_seconds": self.plain_seconds,
            "other_seconds": self.other_seconds,
            "draft_error": self.draft_error,
            "draft_profile": self.draft_profile,
        }


def acceptance(widths: Counter[int], histogram: Counter[int]) -> dict[str, Any]:
    """The figures of rounds counted by the rows of their verify block, and by the drafts that were accepted.

    Near the budget's end blocks have fewer rows than ``block_size``. ``acceptance_by_position`` is, of the rounds that
    proposed a draft at position i, the share that accepted it.
    """
    rounds = sum(histogram.values())
    proposed = sum((rows - 1) * times for rows, times in widths.items())
    accepted = sum(agreed * times for agreed, times in histogram.items())
    places = range(max(widths, default=1) - 1)
    return {
        "effective_block_sizes": _by_number(widths),
        "rounds": rounds,
        "proposed": proposed,
        "accepted": accepted,
        "draft_acceptance_rate": _ratio(accepted, proposed),
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "acceptance_histogram": _by_number(histogram),
        "acceptance_by_position": [
            _beyond(histogram, place) / _beyond(widths, place + 1) for place in places
        ],
    }


def _by_number(counts: Counter[int]) -> dict[str, int]:
    return {str(number): counts[number] for number in sorted(counts)}


def _beyond(counts: Counter[int], bound: int) -> int:
    return sum(times for number, times in counts.items() if number > bound)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
