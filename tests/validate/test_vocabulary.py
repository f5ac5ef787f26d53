"""Vocabulary widths of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import Checkpoint, ConfigView, TensorInfo
from draftpair.checkpoint.storage import Folder
from draftpair.validate.vocabulary import VocabularySizes, vocabulary_relation, vocabulary_sizes


def checkpoint(config: dict[str, Any], **shapes: tuple[int, ...]) -> Checkpoint:
    """A checkpoint of headers alone; ``__`` in a name stands for a dot."""
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    tensors = {
        name: TensorInfo(name, "BF16", shape, "model.safetensors", 0, 0) for name, shape in names.items()
    }
    return Checkpoint("memory", Folder(Path()), None, {}, tensors, ConfigView(config), None, ())


def sizes(rows: int | None, tokenizer: int | None = None) -> VocabularySizes:
    return VocabularySizes(rows, None, None, tokenizer)


def test_rows_come_from_the_headers_outside_the_layers() -> None:
    found = vocabulary_sizes(
        checkpoint(
            {"text_config": {"vocab_size": 120}},
            model__layers__3__embed_tokens__weight=(7, 8),
            model__language_model__embed_tokens__weight=(128, 8),
            model__layers__3__shared_head__head__weight=(7, 8),
            lm_head__weight=(160, 1),
            lm_head__scales=(160, 1),
        ),
        118,
    )
    assert found == VocabularySizes(config=120, embedding_rows=128, head_rows=160, tokenizer=118)
    assert (found.rows, found.consistent) == (160, False)


@pytest.mark.parametrize(
    ("head", "embedding", "config", "rows"),
    [(1, 2, 3, 1), (None, 2, 3, 2), (None, None, 3, 3), (None, None, None, None)],
)
def test_the_output_matrix_decides_the_width(
    head: int | None, embedding: int | None, config: int | None, rows: int | None
) -> None:
    assert VocabularySizes(config, embedding, head, None).rows == rows


@pytest.mark.parametrize(
    ("sizes", "consistent"),
    [
        (VocabularySizes(128, 128, 128, 120), True),
        (VocabularySizes(None, None, None, None), True),
        (VocabularySizes(128, 160, None, 120), False),
        (VocabularySizes(128, 128, None, 129), False),
    ],
    ids=["all agree", "nothing known", "rows differ", "an id too many"],
)
def test_a_side_is_consistent_when_its_figures_agree(sizes: VocabularySizes, consistent: bool) -> None:
    assert sizes.consistent is consistent


@pytest.mark.parametrize(
    ("target", "drafter", "relation"),
    [
        (sizes(128, 120), sizes(128, 120), "equal"),
        (sizes(160, 120), sizes(128, 120), "padded"),
        (sizes(160, 120), sizes(144), "padded"),
        (sizes(160, 120), sizes(128), "different"),
        (sizes(152_064, 151_669), sizes(151_936), "padded"),
        (sizes(154_880, 151_329), sizes(151_552), "different"),
        (sizes(160, 130), sizes(128, 120), "different"),
        (sizes(160), sizes(128), "different"),
        (sizes(None, 120), sizes(128, 120), "unknown"),
    ],
    ids=[
        "equal",
        "padded rows",
        "one tokenizer",
        "too much",
        "Qwen3",
        "GLM-4.5 and 4.7",
        "ids beyond the rows",
        "no tokenizer",
        "no width",
    ],
)
def test_relation(target: VocabularySizes, drafter: VocabularySizes, relation: str) -> None:
    assert vocabulary_relation(target, drafter) == relation
    assert vocabulary_relation(drafter, target) == relation
