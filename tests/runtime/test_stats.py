"""The statistics of a request, from hand-counted rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from draftpair.runtime.stats import Stats


def test_rates_and_histograms_follow_from_the_rounds() -> None:
    stats = Stats("mtp", 4, "--draft-block-size", tokens=9, draft_seconds=0.5, verify_seconds=1.25)
    stats.prefill_seconds, stats.total_seconds = 3.0, 5.0
    for proposed, accepted in ((3, 3), (3, 0), (3, 1), (1, 1)):
        stats.count_round(proposed, accepted)
    report = stats.report()
    assert report["draft_kind"] == "mtp"
    assert (report["block_size"], report["block_size_from"]) == (4, "--draft-block-size")
    assert (report["rounds"], report["proposed"], report["accepted"]) == (4, 10, 5)
    assert report["draft_acceptance_rate"] == 0.5
    assert report["mean_acceptance_length"] == 2.25
    assert report["acceptance_histogram"] == {"0": 1, "1": 2, "3": 1}
    assert report["acceptance_by_position"] == [3 / 4, 1 / 3, 1 / 3]
    assert report["effective_block_sizes"] == {"2": 1, "4": 3}
    assert (report["decode_seconds"], report["other_seconds"]) == (2, 0.25)
    assert report["tokens_per_second"] == 4


def test_plain_decoding_has_no_rounds_and_unknown_rates() -> None:
    report = Stats(tokens=1).report()
    assert report["rounds"] == report["proposed"] == report["accepted"] == 0
    assert report["acceptance_histogram"] == {}
    assert report["acceptance_by_position"] == []
    for name in (
        "draft_kind",
        "block_size",
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_second",
    ):
        assert report[name] is None


def test_a_phase_is_timed_even_when_it_fails() -> None:
    stats = Stats()
    with pytest.raises(KeyError), stats.clock("draft"):
        raise KeyError
    assert stats.draft_seconds > 0


def test_what_a_reader_does_between_two_groups_is_not_timed() -> None:
    stats, slept = Stats(), 0.05

    def groups() -> Iterator[int]:
        time.sleep(slept)
        yield 1
        time.sleep(slept)
        yield 2

    for _ in stats.timed(groups()):
        time.sleep(10 * slept)
    assert 2 * slept <= stats.total_seconds < 10 * slept
