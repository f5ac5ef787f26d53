"""A disk that is full, broken or read-only: a clear error, and everything as it was before.

Errors are the system's own where it can be brought to give them, by a limit on file sizes and by permissions;
and one is raised in place of every call that a small run makes on its files.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from draftpair import api

FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))"
FORMS = ("split", "replaced", "attached", "linked")

# Looking for dead runs' folders and locking are for comfort; a file that cannot be linked or sent is copied.
COMFORT = ("os.listdir p 1", "fcntl.flock")
FORGIVEN = {
    "split": COMFORT,
    "replaced": (*COMFORT, "os.link p/.out.draftpair-new/notes"),
    "attached": COMFORT,
    "linked": COMFORT,
}
# What cannot be looked at after the exchange is taken for changed, and goes back.
CONFIRM, CONFIRMING = "os.scandir p/.out.draftpair-new", "changed while this run was writing"
# The exchange or the rename has been made, and only the flush of the parent folder is left.
IN_PLACE = "is in place"


def tree(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every file and folder below a folder; of files also inode, size and time."""
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {
        n: (s.st_mode, s.st_ino, s.st_size, s.st_mtime_ns) if "." in n else (s.st_mode,)
        for n, s in found.items()
    }


class Scene:
    """A folder to write in, put back as it was after a run that got through."""

    def __init__(self, form: str, sources: Any, parent: Path) -> None:
        self.folder = parent / "scene"
        self.out = self.folder / "p" / "out"
        self.command = sources.command(form, self.out)
        self._kept = parent / "kept"
        self._kept.mkdir()
        if form == "replaced":
            api.split_mtp(sources.other, self._kept / "p" / "out")
            (self._kept / "p" / "out" / "notes").write_text("mine")
        self.reset()

    def reset(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        shutil.copytree(self._kept, self.folder)
        self.before = tree(self.folder)


def scenes_and_calls(
    driver: Any, form: str, sources: Any, folder: Path, roots: list[str]
) -> tuple[list[Scene], list[str], Path]:
    """Two scenes, every call of a run up to where it removes what it replaced, and what it wrote."""
    scenes = [Scene(form, sources, make(folder / name)) for name in ("one", "two")]
    (outcome,) = driver.together([(scenes[0].command, {"roots": [str(scenes[0].folder), *roots]})])
    assert outcome.code == 0, outcome.err
    calls = list(takewhile(lambda call: not call.startswith("shutil.rmtree"), outcome.calls))
    written = scenes[0].out.rename(folder / "written")
    scenes[0].reset()
    return scenes, calls, written


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def at_each(
    driver: Any, scenes: list[Scene], faults: list[tuple[str, str]], roots: list[str]
) -> Iterator[tuple[Scene, str, Any]]:
    """A run for each call and what happens there, two at a time, each into a scene as it was."""
    for place in range(0, len(faults), len(scenes)):
        part = list(zip(scenes, faults[place : place + len(scenes)], strict=False))
        runs = [
            (scene.command, {"roots": [str(scene.folder), *roots], "faults": dict([fault])})
            for scene, fault in part
        ]
        for (scene, (call, _)), outcome in zip(part, driver.together(runs), strict=True):
            yield scene, call, outcome


def writes(call: str) -> bool:
    words = ("write", "sendfile", "copy_file_range", "create", "truncate", "allocate", "mkdir", "link")
    return any(word in call.split()[0] for word in words)


def error_of(call: str) -> int:
    """An error that such a call can have: the disk is full for one that writes, and broken for any other."""
    return errno.ENOSPC if writes(call) else errno.EIO


def raising(number: int) -> str:
    return f"raise OSError({number}, os.strerror({number}), path)"


@pytest.mark.parametrize("form", FORMS)
def test_an_error_at_any_call_leaves_everything_as_it_was(
    driver: Any, small: Any, tools: Any, tmp_path: Path, form: str
) -> None:
    roots = [str(small.raw.parent)]
    scenes, calls, written = scenes_and_calls(driver, form, small, tmp_path, roots)
    whole = tools.contents(written)
    chosen = set(tools.some(calls, each=2))
    if form == "split":
        chosen.update(call for call in calls if writes(call))
    faults = [(call, raising(error_of(call))) for call in calls if call in chosen]
    told_in_place = 0
    for scene, call, outcome in at_each(driver, scenes, faults, roots):
        said = f"{call}: {outcome.err}"
        if call.startswith(FORGIVEN[form]):
            assert outcome.code == 0, said
        else:
            assert outcome.code == 3, said
            reason = os.strerror(error_of(call)) in outcome.err
            assert reason or (call.startswith(CONFIRM) and CONFIRMING in outcome.err), said
            named = [scene.out.parent]
            if not writes(call) or call.startswith("os.link"):
                named += [small.raw.parent, f"{Path(call.split()[1]).name} cannot be read"]
            assert any(str(name) in outcome.err for name in named), said
            assert not writes(call) or "draftpair-new" not in outcome.err, said
        told_in_place += IN_PLACE in outcome.err
        if outcome.code == 0 or IN_PLACE in outcome.err:
            assert tools.contents(scene.out) == whole, said
            assert not tools.temporary(scene.out.parent), said
            scene.reset()
        else:
            assert tree(scene.folder) == scene.before, said
    assert told_in_place >= 1


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_cannot_grow_leaves_everything_as_it_was(
    driver: Any, small: Any, tmp_path: Path, form: str
) -> None:
    """The system refuses to let any file grow from the moment on that a file is made: the disk is full."""
    scenes, calls, _ = scenes_and_calls(driver, form, small, tmp_path, [])
    made = [(call, FULL) for call in calls if call.startswith("create")]
    assert made
    for scene, call, outcome in at_each(driver, scenes, made, []):
        said = f"{call}: {outcome.err}"
        assert outcome.code == 3, said
        assert f"{scene.out}" in outcome.err, said
        assert os.strerror(errno.EFBIG) in outcome.err, said
        assert tree(scene.folder) == scene.before, said


def test_a_change_right_before_the_exchange_is_kept(driver: Any, small: Any, tmp_path: Path) -> None:
    """Whatever somebody puts into the destination in the very last moment, also what no drafter's folder holds."""
    for what in ("os.mkdir({!r})", "os.mkfifo({!r})", "open({!r}, 'w').close()", "os.symlink('x', {!r})"):
        scene = Scene("replaced", small, tmp_path)
        late = scene.out / "late"
        faults = {"ctypes.dlopen 1": what.format(str(late))}
        outcome = driver.run(*scene.command, roots=[str(scene.folder)], faults=faults)
        assert outcome.code == 3, outcome.err
        assert "changed while this run was writing" in outcome.err
        assert os.path.lexists(late), what
        late.rmdir() if late.is_dir() else late.unlink()
        assert tree(scene.folder) == scene.before, what
        shutil.rmtree(tmp_path / "kept")


@pytest.mark.parametrize("form", FORMS)
def test_a_read_only_parent(driver: Any, small: Any, tmp_path: Path, form: str) -> None:
    scene = Scene(form, small, tmp_path)
    scene.out.parent.mkdir(exist_ok=True)
    refused_by(scene.out.parent, scene, driver)


@pytest.mark.parametrize("form", FORMS)
def test_a_parent_that_cannot_be_made(driver: Any, small: Any, tmp_path: Path, form: str) -> None:
    scene = Scene(form, small, tmp_path)
    shutil.rmtree(scene.out.parent, ignore_errors=True)
    refused_by(scene.folder, scene, driver)


def refused_by(folder: Path, scene: Scene, driver: Any) -> None:
    before = tree(scene.folder)
    folder.chmod(0o555)
    outcome = driver.run(*scene.command, powerless=True)
    folder.chmod(0o755)
    assert outcome.code == 3, outcome.err
    assert f"{scene.out.parent}: Permission denied" in outcome.err
    assert tree(scene.folder) == before


def test_a_destination_that_may_not_be_changed(driver: Any, small: Any, tmp_path: Path) -> None:
    scene = Scene("replaced", small, tmp_path)
    scene.out.chmod(0o555)
    outcome = driver.run(*scene.command, powerless=True)
    scene.out.chmod(0o755)
    assert outcome.code == 2
    assert f"{scene.out} may not be changed by this user" in outcome.err
    assert tree(scene.folder) == scene.before


@pytest.mark.parametrize("form", FORMS)
def test_a_parent_that_may_be_written_and_not_listed(
    driver: Any, small: Any, tools: Any, tmp_path: Path, form: str
) -> None:
    """As a drop box is: nothing more is needed."""
    scene = Scene(form, small, tmp_path)
    scene.out.parent.mkdir(exist_ok=True)
    scene.out.parent.chmod(0o300)
    outcome = driver.run(*scene.command, powerless=True)
    scene.out.parent.chmod(0o700)
    assert outcome.code == 0, outcome.err
    assert api.validate(scene.out)["verdict"] == "sound"
    assert [path.name for path in scene.out.parent.iterdir()] == ["out"]


def test_permissions_bind_a_powerless_run(driver: Any, small: Any, tmp_path: Path) -> None:
    """What the tests above stand on, whoever runs them."""
    raw = Path(shutil.copytree(small.raw, tmp_path / "raw"))
    (raw / "config.json").chmod(0)
    outcome = driver.run("split-mtp", "--model", raw, "--output", tmp_path / "out", powerless=True)
    assert outcome.code == 3
    assert f"{raw / 'config.json'} cannot be read: Permission denied" in outcome.err
