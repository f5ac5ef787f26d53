"""What the comparator of two widths does at its thresholds, and after a challenger has won."""

from __future__ import annotations

import pytest

from draftpair.runtime.width import Throughput


def widths(controller: Throughput, seconds: dict[int, float], rounds: int) -> list[int]:
    """The widths of so many rounds; one of n rows takes ``seconds[n]`` and emits n tokens."""
    taken = []
    for _ in range(rounds):
        rows = controller.rows()
        controller.record(rows, rows, seconds[rows])
        taken.append(rows)
    return taken


@pytest.mark.parametrize(("share", "rounds"), [(0.64, 4), (0.66, 32)])
def test_a_challenge_is_hopeless_below_65_percent_of_the_held_rate(share: float, rounds: int) -> None:
    seconds = {4: 1.0, 8: 2 / share}
    assert widths(Throughput(4, 8), seconds, 40 + 33) == [4] * 40 + [8] * rounds + [4] * (33 - rounds)


def test_a_challenger_that_wins_is_challenged_as_soon_as_the_first_one_held() -> None:
    controller = Throughput(4, 8)
    lost, begun = {4: 1.0, 8: 4.0}, 40 + 4 + 4 * 32 + 4 + 16 * 32
    assert widths(controller, lost, begun).count(8) == 8
    won = widths(controller, {4: 1.0, 8: 1.0}, 32 + 4 * 32 + 1)
    assert won == [8] * 32 + [8] * (4 * 32) + [4]
