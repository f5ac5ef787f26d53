"""Runs jobs on a few threads: the first failure, or an interrupt, stops them all.

Reading, hashing, writing and MLX all let go of Python's lock, so threads are enough.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

WORKERS = min(4, os.cpu_count() or 1)

Progress = Callable[[str, int, int], None]
"""Called with a stage (`"write"` or `"verify"`), the bytes done and the bytes there are to do."""

_Job = TypeVar("_Job")
_Made = TypeVar("_Made")


class Meter:
    """Counts the bytes of one stage for the progress callback, and stops the jobs of a failed run."""

    def __init__(self, stage: str, total: int, progress: Progress | None) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def advance(self, count: int) -> None:
        """Adds `count` bytes; ends the job that calls it when the run was stopped."""
        if self._stopped.is_set():
            raise _Stopped
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(self._stage, self._done, self._total)

    def stop(self) -> None:
        """Makes every job end at its next `advance`."""
        self._stopped.set()


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
