"""The controllers of the block width, fed with made-up rounds of known speed."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from draftpair.runtime.width import Fixed, Proxy, Throughput, choose

WIDENS: Any = SimpleNamespace(widens=True)
INSISTS: Any = SimpleNamespace(widens=False)


def play(
    controller: Any, seconds: dict[int, float], rounds: int, emitted: dict[int, int] | None = None
) -> list[int]:
    """The widths of so many rounds; one of `n` rows takes `seconds[n]` and emits `emitted[n]`, or n, tokens."""
    widths = []
    for _ in range(rounds):
        rows = controller.rows()
        controller.record(rows, (emitted or {}).get(rows, rows), seconds[rows])
        widths.append(rows)
    return widths


@pytest.mark.parametrize(
    ("requested", "declared", "drafter", "variable", "kind"),
    [
        (8, 4, WIDENS, None, Throughput),
        (8, 4, WIDENS, "throughput", Throughput),
        (8, 4, WIDENS, "Proxy", Proxy),
        (8, 4, WIDENS, "requested", Fixed),
        (8, 4, INSISTS, None, Fixed),
        (4, 4, WIDENS, None, Fixed),
        (3, 4, WIDENS, None, Fixed),
        (8, None, WIDENS, None, Fixed),
        (8, 4, None, None, Fixed),
    ],
)
def test_only_a_request_for_more_leaves_a_choice(
    requested: int, declared: int | None, drafter: Any, variable: str | None, kind: type
) -> None:
    environ = {} if variable is None else {"MLXCEL_MTP_BLOCK_CONTROLLER": variable}
    chosen = choose(requested, declared, drafter, environ)
    assert type(chosen) is kind
    assert chosen.ceiling == requested
    if kind is Fixed:
        assert play(chosen, {requested: 1}, 5) == [requested] * 5


def test_an_unknown_controller_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(8, 4, WIDENS, {"MLXCEL_MTP_BLOCK_CONTROLLER": "fast"}), Throughput)
    assert "MLXCEL_MTP_BLOCK_CONTROLLER is 'fast'; expected throughput, proxy or requested" in caplog.text


def test_the_faster_width_is_held() -> None:
    widths = play(Throughput(4, 8), {4: 1.0, 8: 1.5}, 8 + 32 + 32 + 40)
    assert widths == [4] * 40 + [8] * 72


def test_a_width_that_is_no_faster_is_given_up_after_its_window() -> None:
    widths = play(Throughput(4, 8), {4: 1.0, 8: 2.0}, 8 + 32 + 32 + 64)
    assert widths == [4] * 40 + [8] * 32 + [4] * 64


def test_two_percent_are_needed_to_change() -> None:
    assert play(Throughput(4, 8), {4: 1.0, 8: 1.98}, 100)[-1] == 4
    assert play(Throughput(4, 8), {4: 1.0, 8: 1.95}, 100)[-1] == 8


def test_a_hopeless_challenge_is_broken_off_after_four_rounds() -> None:
    widths = play(Throughput(4, 8), {4: 1.0, 8: 4.0}, 8 + 32 + 4 + 50)
    assert widths == [4] * 40 + [8] * 4 + [4] * 50


def test_each_loss_makes_the_next_challenge_wait_longer_up_to_a_cap() -> None:
    widths = play(Throughput(4, 8), {4: 1.0, 8: 4.0}, 40 + 4 * (4 + 16 + 64 + 64) * 40)
    starts = [i for i in range(1, len(widths)) if widths[i] == 8 and widths[i - 1] == 4]
    windows = [(later - earlier - 4) // 32 for earlier, later in pairwise(starts)]
    assert windows[:4] == [4, 16, 64, 64]


def test_rounds_narrowed_by_the_budget_say_nothing() -> None:
    controller = Throughput(4, 8)
    for _ in range(200):
        controller.record(3, 3, 0.001)
    assert controller.rows() == 4
    assert play(controller, {4: 1.0, 8: 1.0}, 41) == [4] * 40 + [8]


def test_a_window_of_no_time_divides_by_nothing() -> None:
    assert len(play(Throughput(4, 8), {4: 0.0, 8: 0.0}, 200)) == 200


def test_the_proxy_widens_while_most_rounds_are_accepted_whole() -> None:
    controller = Proxy(4, 8)
    assert play(controller, {4: 1, 8: 1}, 9) == [4] * 8 + [8]
    for _ in range(32):
        controller.record(8, 2, 1.0)
    assert controller.rows() == 4
    controller.record(2, 2, 1.0)  # narrower than the drafter's own: no witness
    for number in range(32):
        controller.record(4, 4 if number % 3 else 1, 1.0)
    assert controller.rows() == 8  # 21 of 32 is 65.6 %
