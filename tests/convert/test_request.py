"""Options: what is refused before a checkpoint matters, and the block width."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.convert import Request, plan_split
from draftpair.errors import Usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_bits": 7}, r"--q-bits \(7\) must be one of 2, 3, 4, 5, 6, 8"),
        ({"q_bits": 4, "q_group_size": 16}, r"--q-group-size \(16\) must be one of 32, 64, 128"),
        ({"q_mode": "fp4"}, r"--q-mode \(fp4\) must be one of"),
        ({"q_bits": 8, "q_mode": "nvfp4"}, r"--q-bits \(8\).*4"),
        ({"q_group_size": 32}, r"--q-group-size \(32\) has no effect without --q-bits or --q-mode"),
        ({"norms": "plain"}, r"--norms \(plain\) must be one of auto, zero-centred, shifted"),
        ({"dtype": "float8"}, r"--dtype \(float8\) must be one of keep, bfloat16, float32"),
    ],
    ids=["bits", "group", "mode", "mode with bits", "group alone", "norms", "dtype"],
)
def test_a_bad_option_comes_before_anything_about_the_source(
    tmp_path: Path, options: dict, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path / "empty")
    with pytest.raises(Usage, match=message):
        plan_split(checkpoint, None, Request(tmp_path / "empty", **options))


@pytest.mark.parametrize("size", [2, 8, 16])
def test_a_block_size_within_the_bounds_is_recorded(raw: Path, tmp_path: Path, tools, size: int) -> None:
    assert tools.plan(raw, tmp_path / "out", block_size=size).config()["block_size"] == size


@pytest.mark.parametrize("size", [20000, 17])
def test_a_block_size_above_the_maximum_is_refused(raw: Path, tmp_path: Path, tools, size: int) -> None:
    with pytest.raises(Usage, match=rf"--block-size \({size}\) is above the maximum 16: .* target verifies"):
        tools.plan(raw, tmp_path / "out", block_size=size)


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_block_size_that_proposes_nothing_is_refused(raw: Path, tmp_path: Path, tools, size: int) -> None:
    with pytest.raises(
        Usage, match=rf"--block-size \({size}\) is below the minimum 2: it counts the bonus token"
    ):
        tools.plan(raw, tmp_path / "out", block_size=size)


@pytest.mark.parametrize("declared", ["absent", None, 0, 1])
def test_the_default_is_one_proposal_when_no_depth_is_declared(
    raw: Path, tmp_path: Path, tools, declared
) -> None:
    config = json.loads((raw / "config.json").read_text())
    config["num_nextn_predict_layers"] = declared
    if declared == "absent":
        del config["num_nextn_predict_layers"]
    (raw / "config.json").write_text(json.dumps(config))
    assert tools.plan(raw, tmp_path / "out").block_size.value == 2


def test_the_default_follows_the_tensors_and_not_what_is_declared(raw: Path, tmp_path: Path, tools) -> None:
    tools.edit_json(raw / "config.json", lambda config: config.update(num_nextn_predict_layers=3))
    plan = tools.plan(raw, tmp_path / "out")
    assert (plan.block_size.value, plan.block_size.origin) == (2, "1 head layer(s) + 1")
    assert plan.config()["text_config"]["num_nextn_predict_layers"] == 1
    assert "HEAD-DEPTH" in {finding.rule for finding in plan.findings}
