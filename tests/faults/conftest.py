"""Runs that go wrong on order: a driver for them, sources to split, and how folders are compared."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from fixtures.glm4_moe_lite import (
    Geometry,
    head_shapes,
    trunk_shapes,
    write_checkpoint,
    write_folder,
    write_target,
)

SMALL = {"layers": 1, "experts": 2}
LARGE = Geometry(hidden=256, moe=512, experts=32, layers=1)
"""Of a checkpoint with a head of 26 MB and a small trunk."""

TEMPORARY = re.compile(r"\..+\.draftpair-new-[0-9a-f]{12}")

State = dict[str, tuple[int, int, int, int]]


@dataclass(frozen=True)
class Outcome:
    """What became of a run: its exit code, minus the signal's number when one ended it, and what it said."""

    code: int
    out: str
    err: str
    seconds: float
    calls: list[str] = field(repr=False)


class Driver:
    """Starts runs of the command line as processes of their own; `driver.py` says what a run may have."""

    def __init__(self) -> None:
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads},
            text=True,
        )

    def warm(self, *commands: Sequence[str | Path]) -> None:
        """Run commands in the driver itself, so that the processes it forks have nothing left to import."""
        assert self._ask({"warm": [[str(arg) for arg in command] for command in commands]}) == [0] * len(
            commands
        )

    def run(self, *args: str | Path, **faults: Any) -> Outcome:
        """One run of the command line."""
        return self.together([(args, faults)])[0]

    def together(self, runs: Sequence[tuple[Sequence[str | Path], dict[str, Any]]]) -> list[Outcome]:
        """Several runs, started at the same moment; none of them may meet a bug."""
        asked = [{"args": [str(arg) for arg in args], **faults} for args, faults in runs]
        outcomes = [Outcome(**answer) for answer in self._ask({"runs": asked})]
        assert not [outcome for outcome in outcomes if "bug in draftpair" in outcome.err]
        return outcomes

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Tools:
    """How folders are told apart, in one fixture."""

    @staticmethod
    def state(folder: Path) -> State | None:
        """Kind and mode, inode, size and time of every file of a folder; None when there is no folder."""
        if not folder.is_dir():
            return None
        found = {path.name: path.lstat() for path in folder.iterdir()}
        return {name: (s.st_mode, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found.items()}

    @staticmethod
    def contents(folder: Path) -> dict[str, str]:
        """The hash of every file of a folder, which must hold nothing but plain files."""
        assert all(stat.S_ISREG(path.lstat().st_mode) for path in folder.iterdir())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    @staticmethod
    def temporary(parent: Path) -> list[Path]:
        """The temporary folders that lie in `parent`."""
        return sorted(path for path in parent.iterdir() if TEMPORARY.fullmatch(path.name))

    @classmethod
    def age(cls, parent: Path) -> None:
        """Lets two minutes pass for the temporary folders: younger ones may be a run's that is just starting."""
        then = time.time() - 120
        for folder in cls.temporary(parent):
            os.utime(folder, (then, then))

    @staticmethod
    def some(calls: Sequence[str], each: int) -> list[str]:
        """Of calls that recur, `each` of them, the first and the last included; all others; in order."""
        groups: dict[str, list[int]] = {}
        for place, call in enumerate(calls):
            groups.setdefault(call.rpartition(" ")[0], []).append(place)
        steps = each - 1
        chosen = {g[(len(g) - 1) * step // steps] for g in groups.values() for step in range(each)}
        return [calls[place] for place in sorted(chosen)]


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("driver")
    raw, target = write_checkpoint(folder / "raw"), write_target(folder / "target")
    split = ("split-mtp", "--model", raw, "--output", folder / "drafter", "--force")
    with closing(Driver()) as driver:
        driver.warm(
            (*split, "--q-bits", "4"),
            split,
            ("attach", "--model", target, "--drafter", folder / "drafter", "--output", folder / "whole"),
        )
        yield driver


@dataclass(frozen=True)
class Sources:
    """Checkpoints that no test changes: two raw ones, the target of the first, and the drafter cut from it."""

    raw: Path
    other: Path
    target: Path
    drafter: Path

    def command(self, form: str, out: Path) -> list[str | Path]:
        """The command line of a run into `out`: a split, alone or over what is there, or the drafter's way back."""
        split = ["split-mtp", "--model", self.raw, "--output", out]
        attach = ["attach", "--model", self.target, "--drafter", self.drafter, "--output", out]
        return {
            "split": split,
            "quantized": [*split, "--q-bits", "4"],
            "replaced": [*split, "--force"],
            "replaced by another": ["split-mtp", "--model", self.other, "--output", out, "--force"],
            "attached": attach,
            "linked": [*attach, "--link"],
        }[form]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Of a hundred kilobytes; the raw ones have two shards."""
    folder = tmp_path_factory.mktemp("small")
    raw = write_checkpoint(folder / "raw", shards=2, **SMALL)
    other = write_checkpoint(folder / "other", shards=2, seed=1, **SMALL)
    target = write_target(folder / "target", **SMALL)
    api.split_mtp(raw, folder / "drafter")
    return Sources(raw, other, target, folder / "drafter")


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """With heads of 26 MB, whose writing is most of a split's time."""
    folder = tmp_path_factory.mktemp("large")
    raw, target = (_write_large(folder / name, 0, head=name == "raw") for name in ("raw", "target"))
    other = _write_large(folder / "other", 1, head=True)
    api.split_mtp(raw, folder / "drafter")
    return Sources(raw, other, target, folder / "drafter")


def _write_large(folder: Path, seed: int, head: bool) -> Path:
    noise = np.random.default_rng(seed).standard_normal(1 << 18, "<f4")
    shapes = trunk_shapes(LARGE) | (head_shapes(LARGE) if head else {})
    tensors = {
        # A norm multiplies: its numbers lie around 1.
        name: np.resize(np.roll(noise, place), shape) * (0.1 if "norm" in name else 1) + ("norm" in name)
        for place, (name, shape) in enumerate(shapes.items())
    }
    return write_folder(folder, LARGE, tensors)
