"""Norms of a target: damage, trunks that contradict their convolutions, and heads of another form than the trunk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.families.heads import find_head
from draftpair.validate.target_values import check_target_values
from fixtures import (
    deepseek_v3,
    deepseek_v4,
    glm4_moe,
    glm4_moe_lite,
    hy_v4,
    inkling,
    nemotron_h,
    qwen3_5,
    qwen4_exp,
)
from fixtures.counting import counted
from fixtures.split_heads import Change, Words, altered, edit_tensors, read_words, shift_norms

FOLDERS = {
    "glm4_moe_lite": glm4_moe_lite.write_checkpoint,
    "glm4_moe": glm4_moe.write_checkpoint,
    "deepseek_v3": deepseek_v3.write_checkpoint,
    "deepseek_v4": deepseek_v4.write_checkpoint,
    "hy_v4": hy_v4.write_checkpoint,
    "inkling": inkling.write_checkpoint,
    "nemotron_h": nemotron_h.write_checkpoint,
    "qwen3_5": qwen3_5.write_checkpoint,
    "qwen4_exp": qwen4_exp.write_checkpoint,
}


def filled(name: str, word: int) -> Change:
    return altered(name, lambda words: np.full_like(words, word))


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_said_of_sound_targets(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(FOLDERS[name](tmp_path / "raw"))
    assert list(check_target_values(checkpoint, find_head(checkpoint))) == []
    assert list(check_target_values(checkpoint, None)) == []


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    for model_type in ("qwen3_5", "qwen3_5_moe"):
        qwen3_5.write_checkpoint(folder / f"{model_type} raw", model_type=model_type, layers=4)
        qwen3_5.write_mlx_checkpoint(folder / f"{model_type} mlx", model_type=model_type, layers=4)
    return folder


def of_target(folder: Path) -> list[tuple[str, str, str | None]]:
    checkpoint = open_checkpoint(folder)
    findings = check_target_values(checkpoint, find_head(checkpoint))
    return [(finding.rule, finding.level, finding.where) for finding in findings]


_PLAIN = {"linear_attn", "visual", "vision_tower"}


def only(part: str, change: Callable[[Words], object]) -> Change:
    """The change, to the trunk's tensors alone or to the head's, and not to gated or visual norms."""

    def apply(tensors: Words) -> None:
        chosen = {
            name: tensor
            for name, tensor in tensors.items()
            if ("mtp." in name) == (part == "head")
            and not {"linear_attn", "visual", "vision_tower"} & {*name.split(".")}
        }
        change(chosen)
        tensors.update(chosen)

    return apply


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("form", ["raw", "mlx"])
def test_a_trunk_and_a_head_of_one_form_are_sound(targets: Path, model_type: str, form: str) -> None:
    assert of_target(targets / f"{model_type} {form}") == []


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("form", ["raw", "mlx"])
def test_a_head_of_the_other_form_beside_a_trunk(
    targets: Path, tmp_path: Path, model_type: str, form: str
) -> None:
    """A raw head put into a conversion, and a converted one into a raw export."""
    other = {"raw": "mlx", "mlx": "raw"}[form]
    heads = {
        name.rpartition("mtp.")[2]: tensor
        for name, tensor in read_words(targets / f"{model_type} {other}").items()
        if "mtp." in name
    }
    shutil.copytree(targets / f"{model_type} {form}", tmp_path / "mixed")

    def put(tensors: Words) -> None:
        for name in [name for name in tensors if "mtp." in name]:
            if tensors[name][0].ndim == 1:
                tensors[name] = heads[name.rpartition("mtp.")[2]]

    edit_tensors(tmp_path / "mixed", put)
    ((rule, level, where),) = of_target(tmp_path / "mixed")
    assert (rule, level) == ("HEAD-NORMS", "warning")
    assert where is not None
    assert "mtp." in where
    checkpoint = open_checkpoint(tmp_path / "mixed")
    assert list(check_target_values(checkpoint, None)) == []


def test_a_head_whose_1_was_added_twice(targets: Path, tmp_path: Path) -> None:
    shutil.copytree(targets / "qwen3_5 mlx", tmp_path / "bad")
    edit_tensors(tmp_path / "bad", only("head", shift_norms(1)))
    checkpoint = open_checkpoint(tmp_path / "bad")
    (finding,) = check_target_values(checkpoint, find_head(checkpoint))
    assert (finding.rule, finding.found) == ("HEAD-NORMS", "doubled")
    assert "the head's norms hold 2 + w and the target's 1 + w" in finding.message


@pytest.mark.parametrize(
    ("form", "by", "convention"),
    [("mlx", -1, "zero-centred"), ("mlx", 1, "doubled"), ("raw", 1, "shifted"), ("raw", 2, "doubled")],
)
@pytest.mark.parametrize("with_head", [True, False])
def test_a_trunk_that_contradicts_its_convolutions(
    targets: Path, tmp_path: Path, form: str, by: int, convention: str, with_head: bool
) -> None:
    shutil.copytree(targets / f"qwen3_5 {form}", tmp_path / "bad")
    edit_tensors(tmp_path / "bad", only("trunk", shift_norms(by)))
    checkpoint = open_checkpoint(tmp_path / "bad")
    findings = list(check_target_values(checkpoint, find_head(checkpoint) if with_head else None))
    trunk = next(finding for finding in findings if finding.rule == "TARGET-NORMS")
    assert (trunk.level, trunk.found) == ("error", convention)
    assert {finding.rule for finding in findings} <= {"TARGET-NORMS", "HEAD-NORMS"}
    if convention != "doubled":
        assert "conv1d.weight of shape" in trunk.message


def test_norms_of_a_target_that_are_no_numbers_or_zeros(tmp_path: Path) -> None:
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw")
    edit_tensors(raw, filled("model.layers.1.input_layernorm.weight", 0x7FC0))
    edit_tensors(raw, filled("model.layers.3.enorm.weight", 0))
    assert of_target(raw) == [
        ("TARGET-NORM-VALUES", "error", "model.layers.1.input_layernorm.weight"),
        ("TARGET-NORM-VALUES", "warning", "model.layers.3.enorm.weight"),
    ]


def test_norms_of_a_deep_target_take_few_requests(tmp_path: Path) -> None:
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw", layers=60)
    checkpoint, storage = counted(raw, remote=True)
    assert list(check_target_values(checkpoint, find_head(checkpoint))) == []
    assert len(storage.reads) <= 40
