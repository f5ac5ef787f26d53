"""Config keys that only say whether tensors are there: where the tensors say otherwise, they are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.families import load_families
from draftpair.families.heads import find_head
from fixtures.glm4_moe import write_checkpoint
from fixtures.split_heads import edit_config, edit_tensors


@pytest.mark.parametrize(("key", "size"), [("attention_bias", "bias"), ("use_qk_norm", "qk_norm")])
@pytest.mark.parametrize("there", [True, False], ids=["there", "absent"])
def test_the_tensors_decide_and_the_drafter_says_so(tmp_path: Path, key: str, size: str, there: bool) -> None:
    raw = write_checkpoint(tmp_path / "raw", **{size: there})
    edit_config(raw, lambda config: config.update({key: not there}))
    head = find_head(open_checkpoint(raw))
    assert head
    assert head.complete
    (finding,) = [finding for finding in head.findings if finding.rule == "HEAD-CONFIG-FLAG"]
    assert (finding.level, finding.expected, finding.found) == ("warning", there, not there)
    assert key in finding.message
    report = api.split_mtp(raw, tmp_path / "out")
    assert "HEAD-CONFIG-FLAG" in {finding["rule"] for finding in report["findings"]}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"][key] is there
    names = {tensor["name"].rpartition("self_attn.")[2] for tensor in report["tensors"]}
    assert ({"attention_bias": "q_proj.bias", "use_qk_norm": "q_norm.weight"}[key] in names) is there
    assert api.validate(tmp_path / "out")["verdict"] == "sound"


def test_agreement_is_not_mentioned(tmp_path: Path) -> None:
    head = find_head(open_checkpoint(write_checkpoint(tmp_path / "raw")))
    assert head
    assert head.findings == ()


def test_a_head_that_lacks_what_its_decoder_layers_have_is_not_whole(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", bias=True)
    names = [f"model.layers.2.self_attn.{which}_proj.bias" for which in "qkv"]
    edit_tensors(raw, lambda tensors: [tensors.pop(name) for name in names])
    head = find_head(open_checkpoint(raw))
    assert head
    assert set(head.missing) == set(names)


@pytest.mark.parametrize("name", load_families())
def test_flags_name_tensors_whose_shape_they_switch(name: str) -> None:
    family = load_families()[name]
    shapes = {source.name: source.shape or () for rule in family.rules for source in rule.sources}
    for key, names in family.flags.items():
        for tensor in names:
            assert any(key in entry.split(" * ") for entry in shapes[tensor]), (key, tensor)
