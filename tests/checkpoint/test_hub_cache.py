"""Repositories from the local Hub cache, whose tree is built by hand here; the network is never used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import constants, try_to_load_from_cache

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import ToolError
from fixtures.safetensors_files import write_index, write_weights

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty Hub cache in a place of its own; huggingface_hub reads the variable when it is imported."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def repository(cache) -> Path:
    """`owner/name` at one commit, its files links into blobs, `main` naming that commit."""
    root = cache / "models--owner--name"
    snapshot = root / "snapshots" / COMMIT
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "blobs" / "1").write_text('{"model_type": "tiny"}')
    write_weights(root / "blobs" / "2", {"a": ("U8", (4,))}, fill=7)
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    (root / "refs" / "main").write_text(COMMIT)
    return root


@pytest.mark.parametrize(
    "source",
    ["owner/name", "owner/name@main", "hf://owner/name", f"owner/name@{COMMIT}", f"hf://owner/name@{COMMIT}"],
)
def test_a_cached_repository_opens(repository, source):
    checkpoint = open_checkpoint(source)
    assert checkpoint.source == source
    assert checkpoint.revision == COMMIT
    assert checkpoint.root == repository / "snapshots" / COMMIT
    assert checkpoint.findings == ()
    assert checkpoint.config.model_type == "tiny"
    assert checkpoint.read(checkpoint.tensors["a"]) == b"\7\7\7\7"
    assert list(checkpoint.files) == ["model.safetensors"]


def test_the_layout_is_the_one_the_library_reads(repository):
    found = try_to_load_from_cache("owner/name", "config.json", cache_dir=repository.parent)
    assert Path(found).parent == open_checkpoint("owner/name").root


def test_a_branch_with_a_slash(repository):
    (repository / "refs" / "refs" / "pr").mkdir(parents=True)
    (repository / "refs" / "refs" / "pr" / "3").write_text(COMMIT)
    assert open_checkpoint("owner/name", revision="refs/pr/3").revision == COMMIT


def test_a_snapshot_given_as_a_path_knows_its_commit(repository):
    assert open_checkpoint(repository / "snapshots" / COMMIT).revision == COMMIT


def test_one_file_of_a_snapshot(repository):
    checkpoint = open_checkpoint(repository / "snapshots" / COMMIT / "model.safetensors")
    assert checkpoint.revision == COMMIT
    assert checkpoint.config.model_type == "tiny"


def test_a_link_into_nothing(repository):
    (repository / "blobs" / "2").unlink()
    checkpoint = open_checkpoint("owner/name")
    [finding] = checkpoint.findings
    assert (finding.rule, finding.level, finding.where) == (
        "FILE-DANGLING-LINK",
        "error",
        "model.safetensors",
    )
    assert "../../blobs/2" in finding.message
    assert "hf download" in finding.hint
    assert checkpoint.tensors == {}


def test_a_dangling_shard_is_not_also_missing(repository):
    snapshot = repository / "snapshots" / COMMIT
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (snapshot / "model.safetensors").rename(snapshot / first)
    (snapshot / second).symlink_to("../../blobs/gone")
    write_index(snapshot, {"a": first, "b": second}, total_size=99)
    assert [finding.rule for finding in open_checkpoint("owner/name").findings] == ["FILE-DANGLING-LINK"]


@pytest.mark.parametrize(("name", "level"), [("config.json", "error"), ("README.md", "warning")])
def test_dangling_files_that_are_no_weights(repository, name, level):
    link = repository / "snapshots" / COMMIT / name
    link.unlink(missing_ok=True)
    link.symlink_to(link)
    [finding] = open_checkpoint("owner/name").findings
    assert (finding.rule, finding.level, finding.where) == ("FILE-DANGLING-LINK", level, name)


def test_links_made_by_a_relative_cache_path(repository):
    snapshot = repository / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("hub/models--owner--name/blobs/2")
    assert [finding.rule for finding in open_checkpoint("owner/name").findings] == ["FILE-DANGLING-LINK"]


def test_a_repository_that_is_not_there(cache):
    with pytest.raises(
        ToolError, match="owner/typo is no path here, and owner/typo is not in the Hub cache"
    ) as caught:
        open_checkpoint("owner/typo")
    assert caught.value.exit_code == 3
    assert "hf download owner/typo" in caught.value.hint


def test_a_cache_that_is_not_there(cache):
    cache.rmdir()
    with pytest.raises(ToolError, match="not in the Hub cache"):
        open_checkpoint("owner/name")


def test_a_revision_that_is_not_there(repository):
    with pytest.raises(
        ToolError, match=rf"owner/name@dev \(dev\) is not in the Hub cache, which holds {COMMIT}"
    ) as caught:
        open_checkpoint("owner/name@dev")
    assert "hf download owner/name --revision dev" in caught.value.hint
    assert f"owner/name@{COMMIT}" in caught.value.hint


def test_a_branch_whose_snapshot_is_gone(repository):
    (repository / "refs" / "main").write_text(OTHER)
    with pytest.raises(ToolError, match=OTHER) as caught:
        open_checkpoint("owner/name")
    assert f"owner/name@{COMMIT}" in caught.value.hint


def test_a_repository_of_refs_only(cache):
    (cache / "models--owner--name" / "refs").mkdir(parents=True)
    with pytest.raises(ToolError, match="holds no snapshot of it"):
        open_checkpoint("owner/name")


def test_a_ref_that_leaves_the_cache(repository):
    (repository / "refs" / "main").write_text("../../../..")
    with pytest.raises(ToolError, match="is not in the Hub cache"):
        open_checkpoint("owner/name")


def test_an_empty_snapshot(repository):
    for name in os.listdir(repository / "snapshots" / COMMIT):
        (repository / "snapshots" / COMMIT / name).unlink()
    with pytest.raises(ToolError, match="holds no files"):
        open_checkpoint("owner/name")
