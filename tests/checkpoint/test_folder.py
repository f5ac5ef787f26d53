"""A folder appears whole or not at all, whatever was there and whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draftpair.checkpoint import exchange as swapping
from draftpair.checkpoint import folder as folders
from draftpair.checkpoint.exchange import exchange, exchange_by_renames
from draftpair.checkpoint.folder import staged_folder
from draftpair.errors import ToolError, Usage


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace(destination: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Replace a folder by one with another file `a`; `meanwhile` runs before it is put in place."""
    with staged_folder(destination, replace=True) as staged:
        (staged / "a").write_text("new a")
        meanwhile()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A destination with two files."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a").write_text("old a")
    (folder / "b").write_text("old b")
    return folder


def test_a_new_folder_appears_only_at_the_end(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out", replace=False) as staged:
        assert staged.parent == tmp_path
        (staged / "x").write_text("x")
        assert not (tmp_path / "out").exists()
    assert contents(tmp_path / "out") == {"x": "x"}
    assert names(tmp_path) == ["out"]


def test_a_replaced_folder_keeps_what_the_new_one_lacks(old: Path) -> None:
    inode = (old / "b").stat().st_ino
    with staged_folder(old, replace=True) as staged:
        (staged / "a").write_text("new a")
        assert contents(old) == {"a": "old a", "b": "old b"}
    assert contents(old) == {"a": "new a", "b": "old b"}
    assert (old / "b").stat().st_ino == inode
    assert names(old.parent) == ["out"]


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is flushed and what is moved, in order, each by its inode."""
    events: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def flush(fd: int) -> None:
        events.append(("flush", os.fstat(fd).st_ino))
        fsync(fd)

    def move(source: Path, target: Path) -> None:
        events.append(("move", os.stat(source).st_ino))
        rename(source, target)

    def swap(first: Path, second: Path) -> None:
        events.append(("move", os.stat(first).st_ino))
        exchange(first, second)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    monkeypatch.setattr(folders, "exchange", swap)
    return events


@pytest.mark.parametrize("name", ["new", "out"], ids=["a new folder", "a replaced folder"])
def test_the_folder_is_flushed_whole_then_moved_and_its_parent_flushed_last(
    old: Path, journal: list[tuple[str, int]], name: str
) -> None:
    destination = old.parent / name
    with staged_folder(destination, replace=True) as staged:
        (staged / "a").write_text("new a")
        (staged / "x").write_text("x")
        folder = staged.stat().st_ino
    assert destination.stat().st_ino == folder
    assert ("move", folder) in journal
    moved = journal.index(("move", folder))
    # The carried-over file of a replaced folder is one of these.
    files = {("flush", path.stat().st_ino) for path in destination.iterdir()}
    assert set(journal[: moved - 1]) == files
    assert journal[moved - 1] == ("flush", folder)
    assert journal[-1] == ("flush", destination.parent.stat().st_ino)


def test_superseded_files_go_even_when_none_replaces_them(old: Path) -> None:
    with staged_folder(old, replace=True, superseded=lambda name: name == "b") as staged:
        (staged / "x").write_text("x")
    assert contents(old) == {"a": "old a", "x": "x"}


def test_files_are_copied_where_they_cannot_be_linked(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(folders.os, "link", refuse)
    with staged_folder(old, replace=True) as staged:
        (staged / "x").write_text("x")
    assert contents(old) == {"a": "old a", "b": "old b", "x": "x"}


def test_without_replace_only_an_empty_folder_gives_way(old: Path, tmp_path: Path) -> None:
    with pytest.raises(Usage, match="exists and is not empty"), staged_folder(old, replace=False):
        pass
    (tmp_path / "empty").mkdir()
    with staged_folder(tmp_path / "empty", replace=False) as staged:
        (staged / "x").write_text("x")
    assert contents(tmp_path / "empty") == {"x": "x"}


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["out", "p/q/new"])
def test_any_exception_leaves_what_was_there(old: Path, kind: type[BaseException], name: str) -> None:
    def fail() -> None:
        raise kind

    with pytest.raises(kind):
        replace(old.parent / name, fail)
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert names(old.parent) == ["out"]


def move_away(folder: Path) -> None:
    folder.rename(folder.parent / "moved")
    folder.mkdir()
    (folder / "a").write_text("theirs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "c").write_text("c"), "changed while"),
        (lambda folder: (folder / "b").write_text("another b"), "changed while"),
        (lambda folder: (folder / "b").unlink(), "changed while"),
        (lambda folder: (folder / "sub").mkdir(), "which is not a plain file"),
        (move_away, "changed while"),
    ],
    ids=["file added", "file changed", "file removed", "folder added", "folder replaced"],
)
def test_a_destination_that_changes_meanwhile_is_left_as_it_is(old: Path, change, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        replace(old, lambda: change(old))
    assert (old / "a").read_text() == ("theirs" if change is move_away else "old a")
    assert not [name for name in names(old.parent) if name.startswith(".")]


def test_a_destination_that_appears_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def appear() -> None:
        out.mkdir()
        (out / "a").write_text("theirs")

    with pytest.raises(ToolError, match="changed while this run was writing"):
        replace(out, appear)
    assert contents(out) == {"a": "theirs"}
    assert names(tmp_path) == ["out"]


def test_a_change_in_the_very_last_moment_is_put_back(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def late(first: Path, second: Path) -> None:
        if not calls:
            (second / "late").write_text("theirs")
        calls.append(first)
        exchange(first, second)

    monkeypatch.setattr(folders, "exchange", late)
    with pytest.raises(ToolError, match="changed while"):
        replace(old)
    assert contents(old) == {"a": "old a", "b": "old b", "late": "theirs"}
    assert names(old.parent) == ["out"]


def test_a_failed_exchange_leaves_what_was_there(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(first: Path, second: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(folders, "exchange", fail)
    with pytest.raises(ToolError, match=r"cannot put .* in place: Device or resource busy"):
        replace(old)
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert names(old.parent) == ["out"]


@pytest.mark.parametrize("how", [exchange, exchange_by_renames])
def test_an_exchange_swaps_two_folders(tmp_path: Path, how) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    how(tmp_path / "one", tmp_path / "two")
    assert contents(tmp_path / "one") == {"two": "two"}
    assert contents(tmp_path / "two") == {"one": "one"}
    assert names(tmp_path) == ["one", "two"]


def test_a_system_without_an_exchange_falls_back_to_renames(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "_swap_call", lambda first, second: False)
    with staged_folder(old, replace=True) as staged:
        (staged / "a").write_text("new a")
    assert contents(old) == {"a": "new a", "b": "old b"}
    assert names(old.parent) == ["out"]


def test_an_interrupted_fallback_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    rename, count = os.rename, []

    def interrupt(source: Path, target: Path) -> None:
        count.append(source)
        if len(count) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(swapping.os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        exchange_by_renames(tmp_path / "one", tmp_path / "two")
    assert contents(tmp_path / "two") == {"two": "two"}


def test_a_dead_runs_folder_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    long_ago = time.time() - 3600
    out = tmp_path / "out"
    dead, kept = tmp_path / ".out.draftpair-new-0123", tmp_path / ".out.draftpair-old-0123"
    for folder in (dead, kept):
        folder.mkdir()
        os.utime(folder, (long_ago, long_ago))
    with staged_folder(out, replace=True) as living:
        os.utime(living, (long_ago, long_ago))
        with staged_folder(out, replace=True) as staged:
            assert living.is_dir()
            assert not dead.exists()
            assert kept.is_dir()
            (staged / "x").write_text("x")
        living_names = names(living)
        assert living_names == []
        out.rename(tmp_path / "aside")
    assert contents(out) == {}


def test_a_killed_run_leaves_the_destination_alone(old: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from draftpair.checkpoint.folder import staged_folder\n"
        "with staged_folder(Path(sys.argv[1]), replace=True) as staged:\n"
        "    (staged / 'a').write_text('new'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(old)], check=False).returncode == -9
    assert contents(old) == {"a": "old a", "b": "old b"}


def test_a_very_long_name_has_room_for_the_temporary_one(tmp_path: Path) -> None:
    with staged_folder(tmp_path / ("é" * 120), replace=False) as staged:
        (staged / "x").write_text("x")
    assert names(tmp_path) == ["é" * 120]


def test_parents_that_cannot_be_made_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(Usage, match="a parent of it is not a folder"),
        staged_folder(tmp_path / "file" / "a", True),
    ):
        pass
