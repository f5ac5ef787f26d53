"""What is found out about a checkpoint is found out once, for as long as the checkpoint is open."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.checkpoint.memo import per_checkpoint
from fixtures.glm4_moe_lite import write_checkpoint

CALLS: list[tuple[Checkpoint, int]] = []


@per_checkpoint
def found(checkpoint: Checkpoint, number: int = 0) -> list[int]:
    """A list of its own for each call that is carried out."""
    CALLS.append((checkpoint, number))
    if number < 0:
        raise ValueError("not to be remembered")
    return [number]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CALLS.clear()
    return write_checkpoint(tmp_path / "raw")


def test_once_for_each_checkpoint_and_argument(folder: Path) -> None:
    one, other = open_checkpoint(folder), open_checkpoint(folder)
    assert found(one) is found(one)
    assert found(one) is not found(other)
    assert found(one, 1) == [1]
    assert found(one, number=2) == [2]
    assert [(one, 0), (other, 0), (one, 1), (one, 2)] == CALLS


def test_an_error_is_not_remembered(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for _ in range(2):
        with pytest.raises(ValueError, match="not to be"):
            found(checkpoint, -1)
    assert len(CALLS) == 2


def test_nothing_is_kept_of_a_checkpoint_that_is_gone(folder: Path) -> None:
    import weakref

    checkpoint = open_checkpoint(folder)
    found(checkpoint)
    CALLS.clear()
    gone = weakref.ref(checkpoint)
    del checkpoint
    gc.collect()
    assert gone() is None
