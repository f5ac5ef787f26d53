"""V4-Flash's `mtp.0` to `mtp.2` are DSpark stages: recognised by their tensors, refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import ToolError
from draftpair.families.heads import find_head, recognised_head
from fixtures.deepseek_v4 import Head, write_checkpoint
from fixtures.split_heads import Words, edit_config, edit_tensors, read_words, removed, split, verdict


def recognised(folder: Path) -> str | None:
    checkpoint = open_checkpoint(folder)
    assert find_head(checkpoint) is None
    found = recognised_head(checkpoint)
    return found.record.name if found and found.record else None


def test_the_stages_are_recognised_and_counted(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", head="dspark")
    assert recognised(raw) == "deepseek_v4_dspark"
    found = recognised_head(open_checkpoint(raw))
    assert (found.prefix, found.layers_found) == ("mtp.", 3)
    assert len(found.tensors) == sum(name.startswith("mtp.") for name in read_words(raw))


def test_the_mtp_route_is_refused_by_name(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", head="dspark")
    with pytest.raises(
        ToolError, match=r"deepseek_v4_dspark: \d+ tensors under mtp\..*next-token-prediction head"
    ):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_validate_says_what_is_there(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", head="dspark")
    assert "unsafe" not in verdict(raw)


@pytest.mark.parametrize(
    "kept",
    [
        "mtp.0.main_proj.weight",
        "mtp.0.main_norm.weight",
        "mtp.2.markov_head.markov_w1.weight",
        "mtp.2.confidence_head.proj.weight",
    ],
)
def test_one_tensor_that_only_stages_have_is_enough(tmp_path: Path, kept: str) -> None:
    raw = write_checkpoint(tmp_path / "raw", head="dspark")
    others = ("main_proj", "main_norm", "markov_head", "confidence_head")

    def thin(tensors: Words) -> None:
        for name in list(tensors):
            if any(part in name for part in others) and name != kept:
                del tensors[name]

    edit_tensors(raw, thin)
    assert recognised(raw) == "deepseek_v4_dspark"


def test_the_stages_of_v41_are_recognised_too(tmp_path: Path) -> None:
    """Its config is nested, and its Markov tables have other names."""
    raw = write_checkpoint(tmp_path / "raw", head="dspark")
    names = {"markov_head.markov_w1.": "markov_head.embed.", "markov_head.markov_w2.": "markov_head.head."}

    def rename(tensors: Words) -> None:
        for old, new in names.items():
            for name in [name for name in tensors if old in name]:
                tensors[name.replace(old, new)] = tensors.pop(name)
        for name in [name for name in tensors if ".main_" in name or "confidence" in name]:
            del tensors[name]

    edit_tensors(raw, rename)
    text = json.loads((raw / "config.json").read_text()) | {"model_type": "deepseek_v41_text"}
    (raw / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": text}))
    assert recognised(raw) == "deepseek_v4_dspark"


@pytest.mark.parametrize(("head", "family"), [("classic", "deepseek_v4_mtp"), ("dspark", None)])
def test_the_tensors_decide_and_not_the_config(tmp_path: Path, head: Head, family: str | None) -> None:
    raw = write_checkpoint(tmp_path / "raw", head=head)
    for ids in ([0, 1, 2], None):
        edit_config(raw, lambda config, ids=ids: config.update(dspark_target_layer_ids=ids))
        match = find_head(open_checkpoint(raw))
        assert (match.family.name if match else None) == family


def test_stages_without_their_special_tensors_are_no_head_that_can_be_split(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", head="dspark")
    edit_tensors(
        raw,
        removed("main_proj.weight", "main_proj.scale", "main_norm.weight", "markov_w1.weight", "markov_w2.weight",
                "confidence_head.proj.weight"),
    )  # fmt: skip
    assert recognised(raw) is None
    with pytest.raises(ToolError):
        split(raw, tmp_path / "drafter")
