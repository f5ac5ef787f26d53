"""What counts as a path and what as a Hub name: a misspelt folder must not become a repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftpair.checkpoint.source import HubName, parse_source
from draftpair.errors import Usage


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("zai-org/GLM-4.7-Flash", "zai-org/GLM-4.7-Flash", None),
        ("owner/name@main", "owner/name", "main"),
        ("owner/name@v1.0", "owner/name", "v1.0"),
        ("hf://owner/name", "owner/name", None),
        ("hf://owner/name@refs/pr/3", "owner/name", "refs/pr/3"),
    ],
)
def test_hub_names(text, repository, revision):
    assert parse_source(text) == HubName(repository, revision)


@pytest.mark.parametrize(
    "text",
    [
        "./owner/name",
        "./name",
        "../name",
        ".hidden/name",
        "/owner",
        "/owner/name",
        "~/name",
        "owner/name/more",
        "owner/name/",
        "name",
        "owner/na me",
        "owner/name@",
        "owner/name@a..b",
        "owner/..",
        "-owner/name",
        "own--er/name",
        "owner/name@refs/pr/3",
    ],
)
def test_paths(text):
    assert isinstance(parse_source(text), Path)


def test_what_exists_is_a_path():
    Path("owner/name").mkdir(parents=True)
    assert parse_source("owner/name") == Path("owner/name")
    assert parse_source("hf://owner/name") == HubName("owner/name", None)


def test_a_path_object_is_a_path():
    assert parse_source(Path("owner/name")) == Path("owner/name")


def test_home_is_expanded(tmp_path):
    assert parse_source("~/models") == tmp_path / "models"
    assert parse_source("~no-such-user/x") == Path("~no-such-user/x")


def test_revision_of_a_hub_name():
    assert parse_source("owner/name", "dev") == HubName("owner/name", "dev")
    assert parse_source("owner/name@dev", "dev") == HubName("owner/name", "dev")
    assert str(parse_source("owner/name", "refs/pr/3")) == "owner/name@refs/pr/3"


@pytest.mark.parametrize(
    ("text", "revision", "message"),
    [
        ("", None, "no path and no Hub name"),
        ("a\0b", None, "no path and no Hub name"),
        ("hf://owner", None, "no Hub name"),
        ("hf://datasets/owner/name", None, "no Hub name"),
        ("hf://owner/name@../../x", None, "no Hub name"),
        ("./name", "main", "is a path"),
        ("owner/name@main", "dev", "different revisions"),
        ("owner/name", "../x", "no revision"),
        ("owner/name", "", "no revision"),
    ],
)
def test_wrong_usage(text, revision, message):
    with pytest.raises(Usage, match=message):
        parse_source(text, revision)
