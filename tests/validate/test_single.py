"""What is said of a checkpoint's role, whatever its family calls its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from fixtures.deepseek_v4 import Head, write_checkpoint
from fixtures.weights import write_json, write_safetensors


def findings(folder: Path) -> dict[str, dict[str, Any]]:
    return {finding["rule"]: finding for finding in api.validate(folder)["findings"]}


@pytest.mark.parametrize(
    ("head", "rule"), [("none", "HEAD-ABSENT"), ("dspark", "HEAD-RECOGNISED"), ("classic", None)]
)
def test_deepseek_v4_is_a_target_with_and_without_a_head(
    tmp_path: Path, head: Head, rule: str | None
) -> None:
    folder = write_checkpoint(tmp_path / "raw", head=head)
    assert api.inspect(folder)["checkpoint"]["role"] == "target"
    assert set(findings(folder)) - {"CONFIG-PARSE"} == ({rule} if rule else set())


def write(folder: Path, *names: str) -> Path:
    folder.mkdir()
    tensors = {name: (np.zeros((4, 4), "<f4"), "F32") for name in names}
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", {"model_type": "stranger"})
    return folder


def test_a_head_is_named_also_where_the_role_is_not_known(tmp_path: Path) -> None:
    found = findings(write(tmp_path / "head alone", "mtp.fc.weight"))
    assert "ROLE-UNKNOWN" not in found
    assert "mtp." in found["HEAD-FAMILY-UNRECORDED"]["message"]


@pytest.mark.parametrize("name", ["embed.weight", "model.embed.weight", "language_model.model.embed.weight"])
def test_an_embedding_of_that_name_and_layers_are_a_target(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", name, "layers.0.norm.weight")
    assert api.inspect(folder)["checkpoint"]["role"] == "target"


@pytest.mark.parametrize("name", ["mtp.2.markov_head.embed.weight", "vision.embed.weight"])
def test_another_embedding_is_none_of_tokens(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", name, "layers.0.norm.weight")
    assert api.inspect(folder)["checkpoint"]["role"] == "unknown"


def test_neither_layers_nor_head(tmp_path: Path) -> None:
    assert set(findings(write(tmp_path / "parts", "embed.weight"))) == {"ROLE-UNKNOWN"}
