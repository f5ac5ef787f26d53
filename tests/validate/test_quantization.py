"""A quantization block that no loader can use, in a target of any family and in a drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.checkpoint.manifest import MANIFEST
from fixtures import qwen3_5
from fixtures.folders import Folders
from fixtures.weights import write_json

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
OWN = {"bits": 4, "group_size": 32}
Block = dict[str, Any]


def with_block(folder: Path, block: Block | None) -> Path:
    """The folder with another block, as both of its twins; without one where it is None."""
    config = json.loads((folder / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
        if block is not None:
            config[key] = block
    write_json(folder / "config.json", config)
    (folder / MANIFEST).unlink(missing_ok=True)
    return folder


def errors(*folders: Path) -> dict[str, str]:
    report = api.validate(*folders)
    found = {f["rule"]: f["message"] for f in report["findings"] if f["level"] == "error"}
    assert (report["verdict"] == "unsafe") == bool(found)
    return found


BLOCKS = pytest.mark.parametrize(
    ("block", "words"),
    [
        (None, "states no bits and no group_size"),
        (FP8, "states no bits and no group_size"),
        ({**FP8, "lm_head": OWN}, "states no bits and no group_size"),
        ({"bits": 4, "lm_head": OWN}, "states no group_size"),
        ({"group_size": 32}, "states no bits"),
        ({"bits": 7, "group_size": 32}, "mode affine with bits 7 and group_size 32"),
        ({"bits": 4.0, "group_size": 32}, "bits 4.0"),
        ({"bits": True, "group_size": 32}, "bits True"),
        ({"bits": 4, "group_size": 16}, "group_size 16"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "mode mxfp4"),
        ({"bits": 4, "group_size": 32, "mode": "int4"}, "mode int4"),
        ({"bits": 4, "group_size": 32, "mode": []}, "mode []"),
    ],
    ids=[
        "none", "fp8", "modules alone", "no group", "no bits", "bits", "float", "bool", "group", "mxfp4", "mode",
        "list",
    ],
)  # fmt: skip


@BLOCKS
def test_a_target_of_a_family_whose_trunk_is_not_recorded(
    tmp_path: Path, block: Block | None, words: str
) -> None:
    folder = with_block(qwen3_5.write_mlx_checkpoint(tmp_path / "mlx", group_size=32), block)
    assert words in errors(folder)["CONFIG-QUANTIZATION"]


@BLOCKS
def test_a_drafter_alone_and_in_a_pair(folders: Folders, block: Block | None, words: str) -> None:
    drafter = with_block(folders.drafter_4bit, block)
    assert "CONFIG-QUANTIZATION" in errors(drafter)
    assert "CONFIG-QUANTIZATION" in errors(folders.target, drafter)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"bits": 7, "group_size": 32}, "bits 7"),
        ({"bits": 4, "group_size": 48}, "group_size 48"),
        ({"mode": "mxfp4", "bits": 8}, "mode mxfp4 with bits 8"),
        ({"mode": "int4"}, "mode int4"),
        ("4", "its setting is '4'"),
    ],
    ids=["bits", "group", "mxfp4", "mode", "text"],
)
def test_a_modules_own_settings(folders: Folders, own: Any, words: str) -> None:
    block = {"bits": 4, "group_size": 32, "mode": "affine", "lm_head": own}
    message = errors(with_block(folders.drafter_4bit, block))["CONFIG-QUANTIZATION"]
    assert words in message
    assert "lm_head" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.update({"lm_head": OWN}),
        lambda block: block.update({"lm_head": {"bits": 4, "group_size": 32, "mode": "affine"}}),
        lambda block: block.update({"renamed.module": {"bits": 8}, "other": False, "quant_method": "mlx"}),
        lambda block: block.update({"config_groups": {"group_0": {}}}),
        lambda block: block.pop("mode"),
    ],
    ids=["own", "own with mode", "of no tensor", "foreign key", "no mode"],
)
def test_what_loaders_read_passes(
    folders: Folders, tmp_path: Path, change: Callable[[Block], object]
) -> None:
    block: Block = {"bits": 4, "group_size": 32, "mode": "affine"}
    change(block)
    target = qwen3_5.write_mlx_checkpoint(tmp_path / "mlx", group_size=32)
    assert errors(with_block(target, block)) == {}
    assert errors(with_block(folders.drafter_4bit, block)) == {}


def test_nothing_is_said_of_a_source_that_mlx_did_not_pack(tmp_path: Path) -> None:
    folder = qwen3_5.write_checkpoint(tmp_path / "fp8", fp8=True, hidden=192, dense=320)
    assert errors(folder) == {}
