"""Runs jobs on a few threads: the first failure, or an interrupt, stops them all.

Reading, hashing, writing, numpy and MLX all let go of Python's lock, so threads are enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from threading import Condition, Event, Lock
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
        self._lock = Lock()
        self._stopped = Event()

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


def in_turns(
    series: Iterable[Iterator[_Job]],
    work: Callable[[_Job], _Made],
    then: Callable[[_Job, _Made], None],
    meter: Meter,
) -> None:
    """Works on the jobs of several series at once, and of one series when no other is left.

    `then` gets each job and what `work` made of it: of one series one at a time and in order, as a hash needs
    it. The series are begun in their order, and as long as there is one for every thread no two work on the
    same. Jobs are asked for only when a thread is free for them. Raises the failure of the first that failed.
    """
    table = _Table(series, meter)

    def serve(_: int) -> None:
        with ExitStack() as unless_done:
            unless_done.callback(table.stop)
            while taken := table.take():
                row, number, job = taken
                made = work(job)
                with table.turn(row, number):
                    then(job, made)
            unless_done.pop_all()

    in_parallel(range(WORKERS), serve, meter)


class _Row(Generic[_Job]):
    """A series under way: the jobs to come, how many were taken and done, how many threads are at work on it."""

    def __init__(self, jobs: Iterator[_Job]) -> None:
        self.jobs = jobs
        self.taken = self.done = self.threads = 0


class _Table(Generic[_Job]):
    """The series of `in_turns` that still have jobs, and whose turn it is."""

    def __init__(self, series: Iterable[Iterator[_Job]], meter: Meter) -> None:
        self._rows = [_Row(jobs) for jobs in series]
        self._meter = meter
        self._changed = Condition()

    def take(self) -> tuple[_Row[_Job], int, _Job] | None:
        """The next job of the row with the fewest threads, and its number; None when there is none."""
        with self._changed:
            while self._rows:
                row = min(self._rows, key=lambda row: row.threads)
                try:
                    job = next(row.jobs)
                except StopIteration:
                    self._rows.remove(row)
                    continue
                row.taken += 1
                row.threads += 1
                return row, row.taken - 1, job
            return None

    @contextmanager
    def turn(self, row: _Row[_Job], number: int) -> Iterator[None]:
        """Waits until the jobs of the row before this one are done; ends the job when the run was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._meter.stopped or row.done == number)
        if self._meter.stopped:
            raise _Stopped
        yield
        with self._changed:
            row.done += 1
            row.threads -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Stops the run, and wakes the threads that wait for their turn."""
        self._meter.stop()
        with self._changed:
            self._changed.notify_all()
