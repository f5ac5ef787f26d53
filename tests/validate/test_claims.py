"""The names that cards give, held against each other: no name is made up, and no card can stop a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from fixtures import tapped
from fixtures.weights import write_json


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return tapped.write_target(tmp_path / "target"), tapped.write_drafter(
        tmp_path / "drafter", "dflash", "old_shape"
    )


def write_card(folder: Path, *lines: str) -> None:
    (folder / "README.md").write_text("\n".join(["---", *lines, "---", "# A model", ""]), encoding="utf-8")


def claim(pair: tuple[Path, Path]) -> dict[str, Any]:
    found: dict[str, Any] = api.validate(*pair)["facts"]["claim"]
    return found


@pytest.mark.parametrize(
    ("own", "base", "relation", "names"),
    [
        (None, "owner/model", "same", ["owner/model"]),
        (None, "owner/model-base", "unknown", []),
        ("Owner/Model", "owner/model-base", "same", ["Owner/Model"]),
        ("owner/model-4bit", "owner/model", "same", ["owner/model", "owner/model-4bit"]),
        ("owner/other", "owner/other-base", "other", ["owner/other"]),
    ],
)
def test_a_base_is_a_name_of_the_target_only_where_the_drafter_names_it(
    pair: tuple[Path, Path], own: str | None, base: str, relation: str, names: list[str]
) -> None:
    target, drafter = pair
    write_card(target, f"base_model: {base}")
    write_card(drafter, "base_model: owner/model")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    write_json(target / "config.json", {**config, "_name_or_path": own})
    found = claim(pair)
    assert (found["relation"], found["target"]) == (relation, names)


def test_a_name_is_never_cut(pair: tuple[Path, Path]) -> None:
    """The front matter is read to a limit; a name that crosses it must not become that of another model."""
    for filler in range(65_485, 65_540, 6):
        write_card(pair[1], f"x: {'a' * filler}", "base_model: owner/model-8b-instruct")
        assert claim(pair)["drafter"] in ([], ["owner/model-8b-instruct"])
