"""Where a split may write, and that a refusal leaves every file as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from draftpair.checkpoint import folder as folders
from draftpair.errors import ToolError, Usage


def make(folder: Path, **files: str) -> Path:
    """A folder with small files; `__` in a name stands for a dot."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    "marker",
    ["model.safetensors", "model.safetensors.index.json", "config.json", "consolidated.safetensors"],
)
def test_a_folder_that_looks_like_a_checkpoint_needs_force(
    raw: Path, tmp_path: Path, tools, marker: str
) -> None:
    out = make(tmp_path / "out", README="hello")
    (out / marker).write_text("x")
    before = tools.state(tmp_path)
    with pytest.raises(Usage, match=rf"{out} already looks like a checkpoint: it holds {marker}") as caught:
        tools.split(raw, out)
    assert "--force" in (caught.value.hint or "")
    assert tools.state(tmp_path) == before


def test_the_first_marker_is_named(raw: Path, tmp_path: Path, tools) -> None:
    out = make(tmp_path / "out", config__json="{}", model__safetensors="x", a__safetensors="x")
    with pytest.raises(Usage, match=r"it holds model\.safetensors"):
        tools.plan(raw, out)


@pytest.mark.parametrize("link", ["nowhere", "elsewhere"])
def test_a_symbolic_link_counts_as_a_marker_wherever_it_leads(
    raw: Path, tmp_path: Path, tools, link: str
) -> None:
    make(tmp_path / "elsewhere")
    out = make(tmp_path / "out")
    (out / "config.json").symlink_to(tmp_path / link)
    with pytest.raises(Usage, match=r"it holds config\.json"):
        tools.plan(raw, out)


def test_a_folder_with_unrelated_files_keeps_them(raw: Path, tmp_path: Path, tools) -> None:
    out = make(tmp_path / "out", README__md="hello", LICENSE="mine")
    os.chmod(out, 0o750)
    (out / "link").symlink_to("../raw/config.json")
    inode = (out / "README.md").stat().st_ino
    done = tools.split(raw, out)
    assert "SPLIT-CARD-KEPT" in {finding.rule for finding in done.plan.findings}
    assert "README.md" not in done.plan.files
    assert (out / "README.md").read_text() == "hello"
    assert (out / "README.md").stat().st_ino == inode
    assert (out / "LICENSE").read_text() == "mine"
    assert os.readlink(out / "link") == "../raw/config.json"
    assert out.stat().st_mode & 0o777 == 0o750
    assert (out / "model.safetensors").is_file()


def test_with_force_the_drafters_card_takes_the_place_of_another(raw: Path, tmp_path: Path, tools) -> None:
    out = make(tmp_path / "out", README__md="hello")
    plan = tools.split(raw, out, force=True).plan
    assert "not a model" in (out / "README.md").read_text()
    (finding,) = [finding for finding in plan.findings if finding.rule == "SPLIT-OUTPUT-REPLACED"]
    assert finding.found == ["README.md"]


def test_a_missing_folder_is_made_with_its_parents(raw: Path, tmp_path: Path, tools) -> None:
    tools.split(raw, tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model-00001-of-00002.safetensors"])
def test_force_deletes_no_weight_file(raw: Path, tmp_path: Path, tools, name: str) -> None:
    out = make(tmp_path / "out", model__safetensors="x", z__safetensors="x")
    (out / name).write_text("x")
    before = tools.state(out)
    with pytest.raises(Usage, match=rf"holds the weight file {name}; .* deletes no weight files"):
        tools.split(raw, out, force=True)
    assert tools.state(out) == before


def test_force_replaces_a_drafter_and_leaves_none_of_its_tokenizer_files(
    raw: Path, tmp_path: Path, tools
) -> None:
    tools.split(raw, tmp_path / "fresh")
    stale = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    out = make(tmp_path / "out", model__safetensors="old", vocab__json="old", notes="mine", NOTICE="mine")
    (out / "model.safetensors.index.json").write_text(stale)
    plan = tools.split(raw, out, force=True).plan
    written = {name: state[3] for name, state in tools.state(tmp_path / "fresh").items()}
    assert {n: s[3] for n, s in tools.state(out).items()} == {**written, "notes": b"mine", "NOTICE": b"mine"}
    (note,) = [f for f in plan.findings if f.rule == "SPLIT-OUTPUT-REPLACED"]
    assert note.found == ["model.safetensors", "model.safetensors.index.json", "vocab.json"]


def test_force_on_a_missing_or_harmless_folder_is_fine(raw: Path, tmp_path: Path, tools) -> None:
    tools.split(raw, tmp_path / "new", force=True)
    tools.split(raw, make(tmp_path / "old", README="x"), force=True)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_cannot_be_listed_is_refused(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    out = make(tmp_path / "out", **({"config__json": "{}"} if force else {}))
    scan = os.scandir

    def deny(path: os.PathLike[str]) -> object:
        if Path(path) == out:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(folders.os, "scandir", deny)
    with pytest.raises(ToolError, match=rf"{out} cannot be listed \(Permission denied\)"):
        tools.split(raw, out, force=force)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_this_user_may_not_write_to_is_refused_up_front(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    out = make(tmp_path / "out", **({"config__json": "{}"} if force else {"notes": "mine"}))
    may = os.access
    monkeypatch.setattr(folders.os, "access", lambda path, mode: Path(path) != out and may(path, mode))
    before = tools.state(tmp_path)
    with pytest.raises(Usage, match=rf"{out} may not be changed by this user"):
        tools.plan(raw, out, force=force)
    assert tools.state(tmp_path) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("way", ["same path", "link to the source", "with dots", "through a linked parent"])
def test_the_source_is_never_the_output(raw: Path, tmp_path: Path, tools, way: str, force: bool) -> None:
    (tmp_path / "link").symlink_to(raw)
    (tmp_path / "parent").symlink_to(tmp_path)
    out = {
        "same path": raw,
        "link to the source": tmp_path / "link",
        "with dots": raw / ".." / "raw",
        "through a linked parent": tmp_path / "parent" / "raw",
    }[way]
    before = tools.state(raw)
    with pytest.raises(Usage, match=r"is the source itself: .* would be overwritten"):
        tools.split(raw, out, force=force)
    assert tools.state(raw) == before


def test_the_folder_of_a_single_source_file_is_the_source_too(raw: Path, tools) -> None:
    with pytest.raises(Usage, match="is the source itself"):
        tools.split(raw / "model.safetensors", raw, force=True)


def test_dots_after_a_link_mean_what_they_mean_to_the_system(raw: Path, tmp_path: Path, tools) -> None:
    make(tmp_path / "deep")
    make(tmp_path / "deep" / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "folder")
    tools.split(raw, tmp_path / "link" / ".." / "out")
    assert (tmp_path / "deep" / "out" / "config.json").is_file()
    (tmp_path / "deep" / "raw").symlink_to(raw)
    with pytest.raises(Usage, match="is the source itself"):
        tools.split(raw, tmp_path / "link" / ".." / "raw", force=True)


def test_a_folder_around_the_source_is_refused(raw: Path, tmp_path: Path, tools) -> None:
    with pytest.raises(Usage, match=rf"{tmp_path} holds the source"):
        tools.split(raw, tmp_path, force=True)


def test_the_folder_that_linked_source_files_really_lie_in_is_refused(
    raw: Path, tmp_path: Path, tools
) -> None:
    store = make(tmp_path / "store")
    (raw / "model.safetensors").rename(store / "model.safetensors")
    (raw / "model.safetensors").symlink_to(store / "model.safetensors")
    before = tools.state(store)
    with pytest.raises(Usage, match=rf"{store} holds the source"):
        tools.split(raw, store, force=True)
    assert tools.state(store) == before


def test_a_folder_inside_the_source_is_allowed(raw: Path, tools) -> None:
    before = tools.state(raw)
    tools.split(raw, raw / "mtp")
    assert {n: s for n, s in tools.state(raw).items() if not n.startswith("mtp")} == before


@pytest.mark.parametrize("force", [False, True])
def test_a_symbolic_link_is_no_output(raw: Path, tmp_path: Path, tools, force: bool) -> None:
    make(tmp_path / "elsewhere")
    for name in ("elsewhere", "nowhere"):
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
        with pytest.raises(Usage, match="is a symbolic link"):
            tools.split(raw, tmp_path / f"to-{name}", force=force)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_planted_link_is_replaced_and_not_written_through(raw: Path, tmp_path: Path, tools) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    out = make(tmp_path / "out")
    (out / "tokenizer.json").symlink_to(victim)
    tools.split(raw, out)
    assert victim.read_text() == "precious"
    assert not (out / "tokenizer.json").is_symlink()


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_a_folder_that_holds_more_than_plain_files_is_refused(
    raw: Path, tmp_path: Path, tools, what: str
) -> None:
    out = make(tmp_path / "out")
    (out / "thing").mkdir() if what == "folder" else os.mkfifo(out / "thing")
    with pytest.raises(Usage, match="holds 'thing', which is not a plain file"):
        tools.split(raw, out)


def test_a_plain_file_is_no_output(raw: Path, tmp_path: Path, tools) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Usage, match="exists and is not a folder"):
        tools.split(raw, tmp_path / "file")
    with pytest.raises(Usage, match="a parent of it is not a folder"):
        tools.split(raw, tmp_path / "file" / "out")


def test_the_current_folder_is_no_output(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make(tmp_path / "here"))
    with pytest.raises(Usage, match="is the current folder and cannot be replaced"):
        tools.split(raw, Path("."))
    tools.split(raw, Path("out"))
    assert (tmp_path / "here" / "out" / "config.json").is_file()


def test_a_bad_request_with_force_leaves_the_old_index_alone(raw: Path, tmp_path: Path, tools) -> None:
    out = make(tmp_path / "out", model__safetensors__index__json="{}")
    before = tools.state(out)
    with pytest.raises(Usage, match="block-size"):
        tools.split(raw, out, force=True, block_size=99)
    assert tools.state(out) == before
