"""How many rows the next verify block has: always the same, or the faster of two widths as measured on the way.

The tokens do not depend on it, only the time they take.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from draftpair.runtime.interfaces import Drafter

VARIABLE = "MLXCEL_MTP_BLOCK_CONTROLLER"

# Rounds, and factors on tokens a second, as mlxcel's comparator has them.
WARM_UP = 8
WINDOW = 32
BETTER = 1.02
HOPELESS = 0.65
HOPELESS_AFTER = 4
FIRST_WAIT, WAIT_FACTOR, LONGEST_WAIT = 4, 4, 64

HISTORY = 32
ENOUGH_HISTORY = 8
WHOLE_SHARE = 0.65

log = logging.getLogger(__name__)


class Controller(Protocol):
    """Asked before each round and told how it went. It may live longer than a request."""

    ceiling: int

    def rows(self) -> int:
        """Rows of the next block, the bonus token included; the loop takes fewer near the token budget."""

    def record(self, rows: int, emitted: int, seconds: float) -> None:
        """A round of ``rows`` rows brought ``emitted`` tokens and took ``seconds``."""


def choose(
    requested: int, declared: int | None, drafter: Drafter | None, environ: Mapping[str, str]
) -> Controller:
    """The controller for a block of ``requested`` rows from a drafter that declares ``declared``.

    Only a request for more than the drafter declares leaves a choice, and only where the drafter ``widens``. How it
    is made says ``MLXCEL_MTP_BLOCK_CONTROLLER``: ``throughput`` (the default), ``proxy``, or ``requested`` for none.
    """
    asked = (environ.get(VARIABLE) or "throughput").strip().lower()
    if asked not in ("throughput", "proxy", "requested"):
        log.warning("%s is %r; expected throughput, proxy or requested; it is ignored", VARIABLE, asked[:40])
        asked = "throughput"
    if (
        drafter is None
        or not drafter.widens
        or declared is None
        or declared >= requested
        or asked == "requested"
    ):
        return Fixed(requested)
    return Proxy(declared, requested) if asked == "proxy" else Throughput(declared, requested)


class Fixed:
    """The same width every round."""

    def __init__(self, rows: int) -> None:
        self.ceiling = rows

    def rows(self) -> int:
        return self.ceiling

    def record(self, rows: int, emitted: int, seconds: float) -> None:
        pass


class Throughput:
    """Two widths, the drafter's own and the one asked for; the one held is challenged by the other now and then.

    After a warm-up each window of rounds gives a rate in tokens a second. A challenger that is clearly faster is
    held from then on; one that loses is left alone for longer each time.
    """

    def __init__(self, declared: int, requested: int) -> None:
        self.ceiling = requested
        self.held, self.other = declared, requested
        self._warming = WARM_UP
        self._challenge = False
        self._held_rate = 0.0
        self._wait, self._windows_left = FIRST_WAIT, 1
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0

    def rows(self) -> int:
        return self.other if self._challenge else self.held

    def record(self, rows: int, emitted: int, seconds: float) -> None:
        if rows != self.rows():
            return  # narrowed by the token budget: says nothing about either width
        if self._warming:
            self._warming -= 1
            return
        self._rounds += 1
        self._tokens += emitted
        self._seconds += seconds
        rate = self._tokens / max(self._seconds, 1e-9)
        hopeless = self._challenge and self._rounds >= HOPELESS_AFTER and rate < HOPELESS * self._held_rate
        if self._rounds >= WINDOW or hopeless:
            self._close_window(rate)

    def _close_window(self, rate: float) -> None:
        if not self._challenge:
            self._held_rate = rate
            self._windows_left -= 1
            self._challenge = self._windows_left <= 0
        elif rate > BETTER * self._held_rate:
            self.held, self.other = self.other, self.held
            self._wait = self._windows_left = FIRST_WAIT
            self._challenge = False
        else:
            self._windows_left = self._wait
            self._wait = min(self._wait * WAIT_FACTOR, LONGEST_WAIT)
            self._challenge = False
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0


class Proxy:
    """The width asked for while most of the last rounds accepted all that the drafter's own width proposes."""

    def __init__(self, declared: int, requested: int) -> None:
        self.ceiling = requested
        self._declared = declared
        self._whole: deque[bool] = deque(maxlen=HISTORY)

    def rows(self) -> int:
        enough = len(self._whole) >= ENOUGH_HISTORY
        widen = enough and sum(self._whole) >= WHOLE_SHARE * len(self._whole)
        return self.ceiling if widen else self._declared

    def record(self, rows: int, emitted: int, seconds: float) -> None:
        if rows >= self._declared:
            self._whole.append(emitted >= self._declared)
