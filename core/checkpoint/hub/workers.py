"""Work on the Hub: on a few threads that end together, and tried again after a pause when that may help."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Event, local
from typing import TypeVar

from draftpair.checkpoint.hub.client import HubError

PAUSE = 0.5
LONGEST_PAUSE = 60.0
"""Seconds: the pause before the second try, doubled with each one, and the longest that a server may ask for."""

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

_thread = local()


class Stopped(Exception):
    """Ends a thread whose work nobody wants any more."""


def at_once(work: Callable[[_Item], _Made], items: Iterable[_Item], workers: int) -> Iterator[_Made]:
    """What `work` makes of each item, in order, with a few items ahead of the reader and no more.

    The first failure, and a reader that goes away, ends all work: at the next byte, and not after a pause.
    """
    left, stop = iter(items), Event()
    running: deque[Future[_Made]] = deque()

    def task(item: _Item) -> _Made:
        _thread.stop = stop
        return work(item)

    pool = ThreadPoolExecutor(workers)
    try:
        running.extend(pool.submit(task, item) for item in islice(left, 2 * workers))
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(task, item) for item in islice(left, 1))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def stop_of_thread() -> Event:
    """What ends the work of this thread early; nothing does in a thread that works for nobody else."""
    stop: Event | None = getattr(_thread, "stop", None)
    return stop or Event()


class Patience:
    """Decides whether to try again, and waits before it."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._failed = 0

    def renew(self) -> None:
        """Progress was made: failures count from zero again."""
        self._failed = 0

    def after(self, error: HubError) -> None:
        """Waits until the next try is due; raises `error` when there is none."""
        self._failed += 1
        if not error.again or self._failed >= self._tries:
            raise error
        pause = PAUSE * 2 ** (self._failed - 1) if error.wait is None else error.wait
        if stop_of_thread().wait(min(pause, LONGEST_PAUSE)):
            raise error


def persist(work: Callable[[], _Made], tries: int) -> _Made:
    """What `work` gives, tried again after a HubError that may pass."""
    patience = Patience(tries)
    while True:
        try:
            return work()
        except HubError as error:
            patience.after(error)
