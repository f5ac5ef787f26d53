"""Threads that share jobs: results in order, turns within a series, and one failure that ends them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from draftpair.convert import parallel
from draftpair.convert.parallel import Meter, in_parallel, in_turns

LENGTHS = (7, 1, 0, 12)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "WORKERS", 3)


def meter() -> Meter:
    return Meter("write", 0, None)


def rows() -> list[Iterator[tuple[int, int]]]:
    return [iter([(row, job) for job in range(length)]) for row, length in enumerate(LENGTHS)]


def test_results_come_in_the_order_of_the_jobs() -> None:
    def late_first(job: int) -> int:
        time.sleep(0.002 * (5 - job))
        return job * job

    assert in_parallel(range(5), late_first, meter()) == [0, 1, 4, 9, 16]


def test_each_series_goes_in_order_and_one_job_at_a_time() -> None:
    done: list[tuple[int, int]] = []
    inside: list[int] = []

    def slow_at_first(job: tuple[int, int]) -> int:
        time.sleep(0.001 * (4 - job[1] % 4))
        return 100 * job[0] + job[1]

    def then(job: tuple[int, int], made: int) -> None:
        assert made == 100 * job[0] + job[1]
        assert job[0] not in inside
        inside.append(job[0])
        time.sleep(0.001)
        done.append(job)
        inside.remove(job[0])

    in_turns(rows(), slow_at_first, then, meter())
    assert sorted(done) == [(row, job) for row, length in enumerate(LENGTHS) for job in range(length)]
    for row, length in enumerate(LENGTHS):
        assert [job for r, job in done if r == row] == list(range(length))


def test_a_single_series_is_shared_by_all_threads() -> None:
    together = threading.Barrier(3, timeout=10)
    in_turns([iter(range(6))], lambda job: together.wait(), lambda job, made: None, meter())


def test_threads_spread_over_the_series_while_there_are_enough() -> None:
    together = threading.Barrier(3, timeout=10)
    begun: list[str] = []

    def work(name: str) -> None:
        begun.append(name)
        together.wait()

    in_turns([iter(name * 20) for name in "abc"], work, lambda job, made: None, meter())
    at_once = [begun[place : place + 3] for place in range(0, 60, 3)]
    assert all(set(names) == {"a", "b", "c"} for names in at_once)


@pytest.mark.parametrize("where", ["work", "then", "jobs"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_the_first_failure_ends_the_threads_that_wait_for_their_turn(
    where: str, kind: type[BaseException]
) -> None:
    finished: list[int] = []

    def jobs() -> Iterator[int]:
        for job in range(100):
            if where == "jobs" and job == 4:
                raise kind("broken")
            yield job

    def work(job: int) -> None:
        if job == 4:
            time.sleep(0.02)  # the next ones wait for this one by now
            if where == "work":
                raise kind("broken")

    def then(job: int, made: None) -> None:
        if where == "then" and job == 4:
            raise kind("broken")
        finished.append(job)

    run = meter()
    with pytest.raises(kind, match="broken"):
        in_turns([jobs()], work, then, run)
    assert finished == list(range(len(finished)))
    assert len(finished) <= 4
    assert run.stopped


def test_a_stopped_meter_ends_the_jobs_quietly_and_the_cause_is_raised() -> None:
    run = meter()

    def work(job: int) -> int:
        if job == 2:
            raise OSError("the disk is full")
        while not run.stopped:
            time.sleep(0.001)
        run.advance(1)
        return job

    with pytest.raises(OSError, match="the disk is full"):
        in_parallel(range(3), work, run)


def test_the_meter_reports_every_advance_until_it_is_stopped() -> None:
    seen: list[tuple[str, int, int]] = []
    run = Meter("write", 10, lambda *step: seen.append(step))
    run.advance(4)
    run.advance(6)
    assert seen == [("write", 4, 10), ("write", 10, 10)]
    run.stop()
    with pytest.raises(parallel._Stopped):
        run.advance(1)
