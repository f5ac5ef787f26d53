"""Which files go along with the weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.convert.companions import Companion, copy_companion, find_companions, is_companion
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.hub_server import HubServer, hub_server

OPTIONAL = (
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "LICENSE",
    "NOTICE.txt",
    "License.md",
)


def test_companions_are_copied_byte_for_byte_and_nothing_else_is(raw: Path, tmp_path: Path, tools) -> None:
    for name in (*OPTIONAL, "modeling.py", "README.md"):
        (raw / name).write_bytes(name.encode())
    tools.split(raw, tmp_path / "out")
    copied = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    always = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    for name in {*OPTIONAL, *always, "special_tokens_map.json"}:
        assert copied[name] == (raw / name).read_bytes()
    assert "modeling.py" not in copied
    assert copied["README.md"] != b"README.md"  # the drafter's own card


def test_a_missing_tokenizer_is_a_warning_and_no_refusal(tmp_path: Path, tools) -> None:
    raw = write_checkpoint(tmp_path / "raw", tokenizer=False)
    plan = tools.split(raw, tmp_path / "out").plan
    warnings = [f for f in plan.findings if f.rule == "SPLIT-COMPANION-MISSING"]
    assert [f.where for f in warnings] == ["tokenizer.json", "tokenizer_config.json"]
    assert {f.level for f in warnings} == {"warning"}


def test_a_link_out_of_the_source_is_not_followed(raw: Path, tmp_path: Path, tools) -> None:
    (tmp_path / "secret").write_text("secret")
    (raw / "LICENSE").symlink_to(tmp_path / "secret")
    plan = tools.split(raw, tmp_path / "out").plan
    assert not (tmp_path / "out" / "LICENSE").exists()
    (finding,) = [f for f in plan.findings if f.rule == "SPLIT-COMPANION-OUTSIDE"]
    assert (finding.level, finding.where) == ("warning", "LICENSE")


def test_links_within_the_source_and_dangling_ones_are_harmless(raw: Path, tmp_path: Path, tools) -> None:
    (raw / "LICENSE").symlink_to("generation_config.json")
    (raw / "NOTICE").symlink_to("nowhere")
    tools.split(raw, tmp_path / "out")
    assert not (tmp_path / "out" / "LICENSE").is_symlink()
    assert (tmp_path / "out" / "LICENSE").read_bytes() == (raw / "generation_config.json").read_bytes()
    assert not (tmp_path / "out" / "NOTICE").exists()


def test_blobs_of_the_hub_cache_are_followed(tmp_path: Path, tools) -> None:
    cache = tmp_path / "models--owner--name"
    commit = "f" * 40
    raw = write_checkpoint(cache / "snapshots" / commit)
    (cache / "blobs").mkdir()
    for path in list(raw.iterdir()):
        path.rename(cache / "blobs" / f"hash-of-{path.name}")
        path.symlink_to(Path("..", "..", "blobs", f"hash-of-{path.name}"))
    plan = tools.split(raw, tmp_path / "out").plan
    assert not plan.findings
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]


@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE"])
def test_a_folder_of_that_name_is_no_companion(tmp_path: Path, tools, name: str) -> None:
    raw = write_checkpoint(tmp_path / "raw", tokenizer=False)
    (raw / name).mkdir()
    tools.split(raw, tmp_path / "out")
    assert not (tmp_path / "out" / name).exists()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server, server.in_use(tmp_path / "home", monkeypatch):
        yield server


def found(source: str) -> tuple[list[Companion], list[tuple[str, str | None]]]:
    companions, findings = find_companions(open_checkpoint(source))
    return companions, [(finding.rule, finding.where) for finding in findings]


def test_companions_on_the_hub_are_copied_byte_for_byte(
    raw: Path, tmp_path: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftpair.convert.companions._HUB_CHUNK", 1000)
    for name in (*OPTIONAL, "modeling.py"):
        (raw / name).write_bytes(name.encode() * 500)
    (raw / "NOTICE.txt").write_bytes(b"")
    server.add("owner/name", raw)
    companions, findings = found("owner/name")
    assert findings == []
    assert [companion.name for companion in companions] == sorted(filter(is_companion, os.listdir(raw)))
    (tmp_path / "out").mkdir()
    for companion in companions:
        digest = copy_companion(companion, tmp_path / "out")
        assert (tmp_path / "out" / companion.name).read_bytes() == (raw / companion.name).read_bytes()
        assert digest == hashlib.sha256((raw / companion.name).read_bytes()).hexdigest()


def test_a_tokenizer_that_the_hub_does_not_have_is_missed(tmp_path: Path, server: HubServer) -> None:
    server.add("owner/name", write_checkpoint(tmp_path / "raw", tokenizer=False))
    _, findings = found("owner/name")
    absent = ["tokenizer.json", "tokenizer_config.json"]
    assert findings == [("SPLIT-COMPANION-MISSING", name) for name in absent]


def test_a_cached_link_out_of_the_cache_is_not_followed(raw: Path, tmp_path: Path, server: HubServer) -> None:
    """The weights are not in the cache, so that the rest is read from the Hub."""
    commit = server.add("owner/name", raw).commit
    snapshot = tmp_path / "home" / "hub" / "models--owner--name" / "snapshots" / commit
    blobs = snapshot.parent.parent / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for name, place in (("tokenizer.json", blobs), ("tokenizer_config.json", tmp_path)):
        (place / "blob").write_bytes((raw / name).read_bytes())
        (snapshot / name).symlink_to(place / "blob")
    companions, findings = found("owner/name")
    assert findings == [("SPLIT-COMPANION-OUTSIDE", "tokenizer_config.json")]
    paths = {companion.name: companion.path for companion in companions}
    assert paths.pop("tokenizer.json") == blobs / "blob"
    assert paths
    assert set(paths.values()) == {None}
