"""A run that is killed, at whatever moment, leaves a whole folder, none, or the one that was there before.

What a killed run wrote lies in a temporary folder beside the destination, and the next run removes it.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftpair import api

KILL = "os.kill(os.getpid(), 9)"
LANES = 2
"""Runs at once, each into a folder of its own."""

# What is run, how often it is killed at random, and whether it replaces the folder that the run before it wrote.
FORMS = {
    "split": (40, False),
    "quantized": (25, False),
    "replaced": (35, True),
    "attached": (15, False),
    "linked": (8, False),
}


class Lanes:
    """Folders to run in, and what lies in each: the state of `out`, and which command is next."""

    def __init__(self, driver: Any, tools: Any, parent: Path, form: str, sources: Any) -> None:
        self._driver, self._tools, self._sources = driver, tools, sources
        self._forms = [form, "replaced by another"] if FORMS[form][1] else [form]
        self._replaces = FORMS[form][1]
        self._turn = dict.fromkeys((parent / f"lane{number}" for number in range(LANES)), 0)
        self._wholes: list[dict[str, str]] = []
        for lane in self._turn:
            lane.mkdir()
        self.seconds = min(self._prepare() for _ in self._forms)
        self._extra = {}
        if self._replaces:
            for lane in self._turn:
                (lane / "out" / "notes").write_text("mine")
            self._extra = {"notes": tools.contents(lane / "out")["notes"]}
        self._before = {lane: tools.state(lane / "out") for lane in self._turn}

    def _prepare(self) -> float:
        """One whole run of the next command in each lane; it is what later ones are compared with."""
        outcomes = self.run([{}] * LANES)
        assert [outcome.code for outcome in outcomes] == [0] * LANES, outcomes
        whole, *others = [self._tools.contents(lane / "out") for lane in self._turn]
        assert others == [whole] * len(others)
        out = next(iter(self._turn)) / "out"
        assert api.validate(out)["verdict"] == "sound"
        if self._forms[0] in ("split", "quantized"):
            assert api.validate(self._sources.target, out)["verdict"] in ("proven", "compatible")
        self._wholes.append(whole)
        for lane in self._turn:
            self._next(lane)
        return min(outcome.seconds for outcome in outcomes)

    def _next(self, lane: Path) -> None:
        self._turn[lane] = (self._turn[lane] + 1) % len(self._forms)
        if not self._replaces:
            shutil.rmtree(lane / "out")

    def run(self, each: Sequence[dict[str, Any]]) -> list[Any]:
        """The next command in each lane, at once."""
        runs = [
            (self._sources.command(self._forms[turn], lane / "out"), faults)
            for (lane, turn), faults in zip(self._turn.items(), each, strict=True)
        ]
        return self._driver.together(runs)

    def check(self) -> list[str]:
        """What killed runs have left in each lane: a `whole` folder, `part` of one beside what was, or `nothing`."""
        return [self._check(lane) for lane in self._turn]

    def _check(self, lane: Path) -> str:
        left = self._tools.temporary(lane)
        assert len(left) <= 1
        self._tools.age(lane)
        assert set(lane.iterdir()) <= {*left, lane / "out"}
        if self._tools.state(lane / "out") == self._before[lane]:
            return "part" if left else "nothing"
        assert self._tools.contents(lane / "out") == {**self._wholes[self._turn[lane]], **self._extra}
        self._next(lane)
        self._before[lane] = self._tools.state(lane / "out")
        return "whole"

    def tidy(self) -> None:
        """Removes what the next run would remove before anything else."""
        for lane in self._turn:
            for folder in self._tools.temporary(lane):
                shutil.rmtree(folder)

    def finish(self) -> None:
        """After one more run there is nothing but what it wrote."""
        assert [outcome.code for outcome in self.run([{}] * LANES)] == [0] * LANES
        assert [[path.name for path in lane.iterdir()] for lane in self._turn] == [["out"]] * LANES
        assert self.check() == ["whole"] * LANES


@pytest.mark.parametrize("form", FORMS)
def test_a_run_killed_at_a_random_moment(
    driver: Any, large: Any, tools: Any, tmp_path: Path, form: str
) -> None:
    """Moments from start to end, two of three in the later part of a run, which writes."""
    lanes = Lanes(driver, tools, tmp_path, form, large)
    wanted, seconds = FORMS[form][0], lanes.seconds
    chance, killed = random.Random(form), 0
    left: Counter[str] = Counter()
    for _ in range(4 * wanted):
        moments = [chance.uniform(chance.choice([0.0, 0.3, 0.3]), 1.0) * seconds for _ in range(LANES)]
        outcomes = lanes.run([{"signals": [(moment, signal.SIGKILL)]} for moment in moments])
        for outcome, found in zip(outcomes, lanes.check(), strict=True):
            assert outcome.code in (0, -signal.SIGKILL), outcome
            left[found] += 1
            killed += outcome.code != 0
            # What else this machine has to do changes how long a run takes.
            if outcome.code == 0:
                seconds = outcome.seconds
            elif found == "nothing":
                seconds *= 1.1
        if killed >= wanted:
            break
    assert killed >= wanted
    assert left["part"] >= wanted // 4, left
    lanes.finish()


@pytest.mark.parametrize("form", ["split", "replaced", "attached", "linked"])
def test_a_run_killed_at_any_of_its_calls(
    driver: Any, small: Any, tools: Any, tmp_path: Path, form: str
) -> None:
    """The moments between two changes on disk that a random one rarely meets, each before the call that is named."""
    lanes = Lanes(driver, tools, tmp_path, form, small)
    roots = [str(tmp_path / f"lane{number}") for number in range(LANES)]
    calls = lanes.run([{"roots": roots}] * LANES)[0].calls
    lanes.check()
    begin = calls.index("os.mkdir .out.draftpair-new 1")
    chosen = tools.some(calls[begin:], each=2)
    left: Counter[str] = Counter()
    for place in range(0, len(chosen), LANES):
        points = [*chosen[place : place + LANES], chosen[-1]][:LANES]
        outcomes = lanes.run([{"roots": roots, "faults": {call: KILL}} for call in points])
        assert [outcome.code for outcome in outcomes] == [-signal.SIGKILL] * LANES, (points, outcomes)
        left.update(lanes.check())
        lanes.tidy()
    assert left["part"] > len(chosen) // 2, left
    assert left["whole"] >= 2, left
    lanes.finish()
