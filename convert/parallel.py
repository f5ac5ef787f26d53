"""Runs jobs on a few threads: the first failure, or an interrupt, stops them all.

Reading, hashing, writing, numpy and MLX all let go of Python's lock, so threads are enough.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

Progress = Callable[[str, int, int], None]
"""Called with a stage (such as `"write"`), the bytes done and the bytes there are to do."""

_Job = TypeVar("_Job")
_Made = TypeVar("_Made")


def _cores() -> int:
    """The processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


WORKERS = min(4, _cores())


class Meter:
    """Counts the bytes of one stage for the progress callback, and stops the jobs of a failed run."""

    def __init__(self, stage: str, total: int, progress: Progress | None) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def advance(self, count: int) -> None:
        """Adds `count` bytes; ends the job that calls it when the run was stopped."""
        if self.stopped:
            raise _Stopped
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(self._stage, self._done, self._total)

    def stop(self) -> None:
        """Makes every job end at its next `advance`."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped."""
        return self._stopped.is_set()


class _Stopped(Exception):
    """Ends a job."""


def in_parallel(jobs: Sequence[_Job], work: Callable[[_Job], _Made], meter: Meter) -> list[_Made]:
    """What `work` makes of each job, in order. Raises the failure of the first job that failed."""
    return _run(jobs, work, meter)


def in_turns(
    series: Iterable[Iterable[_Job]],
    work: Callable[[_Job], _Made],
    then: Callable[[_Job, _Made], None],
    meter: Meter,
) -> None:
    """Works on the jobs of several series at once, and on those of one series too; `then` goes in order.

    `then` is called with each job and what `work` made of it, for one series in the order of its jobs and
    one at a time. A thread keeps to its own series while there is another for everyone, so that turns are
    waited for only at the end. Each thread holds one job and one result. Raises the first failure.
    """
    table = _Table([_Series(iter(jobs)) for jobs in series])

    def serve(_: int) -> None:
        while (taken := table.take()) is not None and not meter.stopped:
            place, number, job = taken
            made = work(job)
            with table.turn(place, number, meter):
                then(job, made)

    def serve_or_stop(number: int) -> None:
        try:
            serve(number)
        except BaseException:
            meter.stop()
            table.wake()
            raise

    _run(range(WORKERS), serve_or_stop, meter)


class _Series(Generic[_Job]):
    """One series: the jobs that are left, how many were taken and done, and how many threads work on it."""

    def __init__(self, jobs: Iterator[_Job]) -> None:
        self.jobs = jobs
        self.taken = self.done = self.workers = 0


class _Table(Generic[_Job]):
    """The series that are not finished yet, shared by the threads."""

    def __init__(self, series: list[_Series[_Job]]) -> None:
        self._open = series
        self._changed = threading.Condition()

    def take(self) -> tuple[_Series[_Job], int, _Job] | None:
        """The next job of the series with the fewest threads, with its number; None when all are taken."""
        with self._changed:
            while self._open:
                series = min(self._open, key=lambda one: one.workers)
                for job in series.jobs:
                    series.taken += 1
                    series.workers += 1
                    return series, series.taken - 1, job
                self._open.remove(series)
            return None

    @contextmanager
    def turn(self, series: _Series[_Job], number: int, meter: Meter) -> Iterator[None]:
        """Waits until the jobs before `number` are done; ends the job instead when the run was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: series.done == number or meter.stopped)
        if meter.stopped:
            raise _Stopped
        yield
        with self._changed:
            series.done += 1
            series.workers -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Lets waiting threads see that the run was stopped."""
        with self._changed:
            self._changed.notify_all()


def _run(jobs: Sequence[_Job], work: Callable[[_Job], _Made], meter: Meter) -> list[_Made]:
    def stop_the_others(future: Future[_Made]) -> None:
        if future.exception():
            meter.stop()

    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            futures = [pool.submit(work, job) for job in jobs]
            for future in futures:
                future.add_done_callback(stop_the_others)
            wait(futures)
        finally:
            meter.stop()
    failures = [error for future in futures if (error := future.exception())]
    for failure in failures:
        if not isinstance(failure, _Stopped):
            raise failure
    return [future.result() for future in futures]
