"""A source that changes while it is read: the change is noticed, and nothing is written of two states.

Promised: whatever is written to a file that was looked at, cut off it, put in its place or done to its times,
between the plan and the last byte that is read, ends the run. That holds for a rewrite in place that gives the
file its size and its times back: the system keeps a time of change that nobody can set.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

# What is done to a file at `path`.
CHANGES = {
    "rewritten": "kept = os.stat(path); data = open(path, 'rb').read(); file = open(path, 'r+b'); "
    "file.write(data[:-1] + bytes([data[-1] ^ 1])); file.close(); "
    "os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))",
    "truncated": "os.truncate(path, os.path.getsize(path) - 1)",
    "emptied": "os.truncate(path, 0)",
    "appended": "file = open(path, 'ab'); file.write(b' '); file.close()",
    "replaced": "data = open(path, 'rb').read(); file = open(path + '.part', 'wb'); file.write(data); file.close(); "
    "kept = os.stat(path); os.utime(path + '.part', ns=(kept.st_atime_ns, kept.st_mtime_ns)); "
    "os.rename(path + '.part', path)",
    "touched": "os.utime(path)",
    "deleted": "os.unlink(path)",
}
MAKING = "os.mkdir .out.draftpair-new 1"


def changing(change: str, path: Path) -> str:
    return f"path = {str(path)!r}; {CHANGES[change]}"


class Scene:
    """A copy of the sources, the run, its calls from where it begins to make something, and what it writes."""

    def __init__(self, driver: Any, tools: Any, small: Any, folder: Path, attach: bool) -> None:
        self._driver, self._tools, self._small, self._folder = driver, tools, small, folder
        self.out = folder / "out"
        raw, target, drafter = (folder / name for name in ("raw", "target", "drafter"))
        self.sources = [target, drafter] if attach else [raw]
        self.command: list[str | Path] = ["split-mtp", "--model", raw, "--output", self.out]
        if attach:
            self.command = ["attach", "--model", target, "--drafter", drafter, "--output", self.out]
        self.restore()
        whole = self.run({})
        assert whole.code == 0, whole.err
        self.calls = whole.calls[whole.calls.index(MAKING) :]
        self.written = tools.contents(self.out)
        shutil.rmtree(self.out)
        opened = tuple(f"open {source.name}/" for source in self.sources)
        reads = [place for place, call in enumerate(self.calls) if call.startswith(opened)]
        self.reading = self.calls[: reads[-1] + 1]

    def restore(self) -> None:
        for source in self.sources:
            shutil.rmtree(source, ignore_errors=True)
            shutil.copytree(getattr(self._small, source.name), source)

    def run(self, faults: dict[str, str]) -> Any:
        return self._driver.run(*self.command, roots=[str(self._folder)], faults=faults)

    def run_and_change(self, call: str, change: str, path: Path) -> Any:
        outcome = self.run({call: changing(change, path)})
        said = f"{path.name} {change} at {call}: {outcome.code} {outcome.err}"
        assert outcome.code in (0, 1, 3), said
        if outcome.code == 0:
            assert self._tools.contents(self.out) == self.written, said
            shutil.rmtree(self.out)
        else:
            assert path.name in outcome.err, said
            assert not self.out.exists(), said
        assert not self._tools.temporary(self._folder), said
        self.restore()
        return outcome


@pytest.mark.parametrize("attach", [False, True], ids=["split", "attach"])
def test_a_file_that_changes_at_a_random_moment(
    driver: Any, small: Any, tools: Any, tmp_path: Path, attach: bool
) -> None:
    """While sources are read the change is refused; later it may be, or what is written is what was read before."""
    scene = Scene(driver, tools, small, tmp_path, attach)
    chance = random.Random(attach)
    files = [path for source in scene.sources for path in sorted(source.iterdir()) if is_read(path, attach)]
    for path in files:
        for change in chance.sample(sorted(CHANGES), 3):
            call = chance.choice(scene.reading)
            outcome = scene.run_and_change(call, change, path)
            assert outcome.code != 0, f"{path.name} {change} at {call}"
    for _ in range(10):
        scene.run_and_change(chance.choice(scene.calls), chance.choice(sorted(CHANGES)), chance.choice(files))


def is_read(path: Path, attach: bool) -> bool:
    """All of a raw source and of a target; of a drafter its weights and its config."""
    return not attach or path.parent.name == "target" or path.name in ("config.json", "model.safetensors")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json", "tokenizer.json"])
def test_every_change_of_a_file_that_a_split_reads(
    driver: Any, small: Any, tools: Any, tmp_path: Path, name: str, change: str
) -> None:
    """Right after the plan, when nothing but headers and config was read."""
    scene = Scene(driver, tools, small, tmp_path, attach=False)
    outcome = scene.run_and_change(MAKING, change, tmp_path / "raw" / name)
    assert outcome.code == (3 if change == "deleted" else outcome.code)
    assert outcome.code in (1, 3)
    assert "hint" in outcome.err or change == "deleted"


def test_a_linked_target_may_be_linked_by_others_too(
    driver: Any, small: Any, tools: Any, tmp_path: Path
) -> None:
    """A link changes a file's time of change, and nothing else: `attach --link` must not trip over its own."""
    target = Path(shutil.copytree(small.target, tmp_path / "target"))
    out = tmp_path / "out"
    attach = ["attach", "--model", target, "--drafter", small.drafter, "--output", out, "--link"]
    outcome = driver.run(*attach)
    assert outcome.code == 0, outcome.err
    assert (out / "model.safetensors").samefile(target / "model.safetensors")
