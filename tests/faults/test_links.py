"""Links and other things that are no plain files, planted in a source, at a destination and inside of it.

Nothing is written through a link, nothing outside of a source is copied, and nothing makes a run wait forever.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import folder as folders
from draftpair.checkpoint.folder import staged_folder
from draftpair.errors import ToolError

SECRET = "nobody's business"


@pytest.fixture
def raw(small: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small.raw, tmp_path / "raw"))


@pytest.fixture
def target(small: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small.target, tmp_path / "target"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with one file, in which nothing may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text(SECRET)
    return folder


def split(source: Path, out: Path, *options: str) -> list[str | Path]:
    return ["split-mtp", "--model", source, "--output", out, *options]


def texts(folder: Path) -> str:
    return "".join(path.read_bytes().decode("latin-1") for path in folder.iterdir())


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link to a secret": lambda path, outside: path.symlink_to(outside / "secret"),
    "link to the password file": lambda path, outside: path.symlink_to("/etc/passwd"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path, outside: path.symlink_to(pipe(outside.parent / "pipe")),
    "link to itself": lambda path, outside: path.symlink_to(path.name),
    "pipe": lambda path, outside: pipe(path),
    "folder": lambda path, outside: path.mkdir(),
}
ASTRAY = ("link to a secret", "link to the password file")


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE"])
def test_a_companion_that_is_no_file_of_the_source_is_not_copied(
    driver: Any, raw: Path, outside: Path, tmp_path: Path, name: str, what: str
) -> None:
    (raw / name).unlink(missing_ok=True)
    PLANTED[what](raw / name, outside)
    outcome = driver.run(*split(raw, tmp_path / "out"))
    assert outcome.code == 0, outcome.err
    assert not os.path.lexists(tmp_path / "out" / name)
    assert SECRET not in texts(tmp_path / "out")
    if what in ASTRAY:
        assert f"{name} is a symbolic link that leads out of the source folder" in outcome.out


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("options", [[], ["--link"]], ids=["copied", "linked"])
def test_attach_brings_only_files_of_the_target(
    driver: Any, small: Any, target: Path, outside: Path, tmp_path: Path, options: list[str], what: str
) -> None:
    PLANTED[what](target / "LICENSE", outside)
    out = tmp_path / "out"
    attach = ["attach", "--model", target, "--drafter", small.drafter, "--output", out, *options]
    outcome = driver.run(*attach)
    if what in ASTRAY:
        assert outcome.code == 1, outcome
        assert "LICENSE" in outcome.err
        assert "leads out of" in outcome.err
        assert not out.exists()
    else:
        assert outcome.code == 0, outcome.err
        assert not os.path.lexists(out / "LICENSE")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").stat().st_nlink == 1


@pytest.mark.parametrize("what", PLANTED)
def test_a_companion_that_turns_into_something_else_meanwhile(
    driver: Any, raw: Path, outside: Path, tools: Any, tmp_path: Path, what: str
) -> None:
    """Between the plan, which found a plain file, and the copy."""
    plant = tmp_path / "plant" / "tokenizer.json"
    plant.parent.mkdir()
    PLANTED[what](plant, outside)
    companion = raw / "tokenizer.json"
    if what == "link to itself":
        plant.unlink()
        plant.symlink_to(companion)
    swap = f"os.unlink({str(companion)!r}); os.rename({str(plant)!r}, {str(companion)!r})"
    before = tools.state(outside)
    outcome = driver.run(
        *split(raw, tmp_path / "out"),
        roots=[str(tmp_path)],
        faults={"create .out.draftpair-new/tokenizer.json 1": swap},
    )
    assert outcome.code in (1, 3), outcome
    assert "tokenizer.json" in outcome.err
    assert not (tmp_path / "out").exists()
    assert not tools.temporary(tmp_path)
    assert tools.state(outside) == before


def test_a_weight_file_that_turns_into_a_pipe_meanwhile(
    driver: Any, raw: Path, tools: Any, tmp_path: Path
) -> None:
    swaps = [
        f"os.unlink({str(path)!r}); os.mkfifo({str(path)!r})" for path in sorted(raw.glob("*.safetensors"))
    ]
    outcome = driver.run(
        *split(raw, tmp_path / "out"),
        roots=[str(tmp_path)],
        faults={"os.truncate 1": "; ".join(swaps)},
    )
    assert outcome.code in (1, 3), outcome
    assert ".safetensors" in outcome.err
    assert not (tmp_path / "out").exists()
    assert not tools.temporary(tmp_path)


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_a_link_as_destination(
    driver: Any, small: Any, outside: Path, tools: Any, tmp_path: Path, force: list[str]
) -> None:
    before = tools.state(outside)
    for aim in (outside, tmp_path / "nowhere", outside / "secret"):
        link = tmp_path / "link"
        link.symlink_to(aim)
        outcome = driver.run(*split(small.raw, link, *force))
        assert outcome.code == 2
        assert f"{link} is a symbolic link" in outcome.err
        assert Path(os.readlink(link)) == aim
        link.unlink()
    assert tools.state(outside) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]


def test_a_link_that_appears_as_destination_meanwhile(
    driver: Any, small: Any, outside: Path, tools: Any, tmp_path: Path
) -> None:
    link, before = tmp_path / "out", tools.state(outside)
    for call in (
        "os.mkdir .out.draftpair-new 1",
        "create .out.draftpair-new/model.safetensors 1",
        "create .out.draftpair-new/config.json 1",
        "os.rename out 1",
    ):
        outcome = driver.run(
            *split(small.raw, link),
            roots=[str(tmp_path)],
            faults={call: f"os.symlink({str(outside)!r}, {str(link)!r})"},
        )
        assert outcome.code in (2, 3), (call, outcome)
        assert str(link) in outcome.err
        assert link.is_symlink(), call
        link.unlink()
        assert tools.state(outside) == before, call
        assert list(tmp_path.iterdir()) == [outside]


def test_a_destination_that_is_replaced_by_a_link_meanwhile(
    driver: Any, small: Any, tools: Any, tmp_path: Path
) -> None:
    """With --force: the drafter that was there is moved away, and a link leads to it."""
    out, moved = tmp_path / "out", tmp_path / "moved"
    swap = f"os.rename({str(out)!r}, {str(moved)!r}); os.symlink({str(moved)!r}, {str(out)!r})"
    for call in (
        "create .out.draftpair-new/model.safetensors 1",
        "os.chmod .out.draftpair-new 1",
        "ctypes.dlopen 1",
    ):
        shutil.copytree(small.drafter, out)
        before = tools.state(out)
        outcome = driver.run(*split(small.other, out, "--force"), roots=[str(tmp_path)], faults={call: swap})
        assert outcome.code in (2, 3), (call, outcome)
        assert os.readlink(out) == str(moved), call
        assert tools.state(moved) == before, call
        out.unlink()
        shutil.rmtree(moved)
        assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_replaced_by_a_link_meanwhile(
    driver: Any, small: Any, outside: Path, tools: Any, tmp_path: Path
) -> None:
    """The run can no longer reach what it has written, and must write nothing to where the link leads."""
    parent, moved = tmp_path / "parent", tmp_path / "moved"
    swap = f"os.rename({str(parent)!r}, {str(moved)!r}); os.symlink({str(outside)!r}, {str(parent)!r})"
    before = tools.state(outside)
    for call in (
        "fcntl.flock 1",
        "create .out.draftpair-new/model.safetensors 1",
        "os.truncate 1",
        "create .out.draftpair-new/config.json 1",
        "os.rename out 1",
    ):
        parent.mkdir()
        outcome = driver.run(*split(small.raw, parent / "out"), roots=[str(parent)], faults={call: swap})
        assert outcome.code == 3, (call, outcome)
        assert str(parent) in outcome.err or "model.safetensors cannot be read" in outcome.err
        assert [path for path in moved.iterdir() if path not in tools.temporary(moved)] == []
        assert tools.state(outside) == before, call
        parent.unlink()
        shutil.rmtree(moved)


def test_links_inside_a_replaced_folder_are_not_written_through(
    driver: Any, small: Any, outside: Path, tools: Any, tmp_path: Path
) -> None:
    written = sorted(path.name for path in small.drafter.iterdir())
    out = tmp_path / "out"
    out.mkdir()
    for name in (*written, "vocab.json", "notes"):
        (out / name).symlink_to(outside / ("secret" if name != "merges.txt" else "nowhere"))
    before = tools.state(outside)
    outcome = driver.run(*split(small.raw, out, "--force"))
    assert outcome.code == 0, outcome.err
    assert tools.state(outside) == before
    assert (outside / "secret").read_text() == SECRET
    assert os.readlink(out / "notes") == str(outside / "secret")
    (out / "notes").unlink()
    assert tools.contents(out) == tools.contents(small.drafter)


def test_links_inside_the_temporary_folder_are_not_written_through(
    driver: Any, small: Any, outside: Path, tools: Any, tmp_path: Path
) -> None:
    """Planted by somebody who may write there as soon as the folder is made."""
    before = tools.state(outside)
    find = f"next(n for n in os.listdir({str(tmp_path)!r}) if 'draftpair-new' in n)"
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        for aim in ("secret", "new"):
            place = f"os.path.join({str(tmp_path)!r}, {find}, {name!r})"
            plant = f"os.symlink({str(outside / aim)!r}, {place})"
            outcome = driver.run(
                *split(small.raw, tmp_path / "out"), roots=[str(tmp_path)], faults={"fcntl.flock 1": plant}
            )
            # The system's own word for it: a name where a file is to be made is taken.
            assert outcome.code == 3, (name, outcome)
            assert f"{tmp_path / 'out' / name}: File exists" in outcome.err
            assert tools.state(outside) == before
            assert list(tmp_path.iterdir()) == [outside]


def test_a_planted_temporary_folder_is_not_used(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were its random name known: a link of that name is not followed."""
    monkeypatch.setattr(folders.secrets, "token_hex", lambda size: "0" * 2 * size)
    planted = tmp_path / ".out.draftpair-new-000000000000"
    planted.symlink_to(outside)
    with pytest.raises(ToolError, match="File exists"), staged_folder(tmp_path / "out", replace=False):
        pass
    assert planted.is_symlink()
    assert [path.name for path in outside.iterdir()] == ["secret"]
