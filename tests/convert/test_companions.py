"""Which files go along with the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.glm4_moe_lite import write_checkpoint

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
    assert not copied.keys() & {"modeling.py", "README.md"}


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
