"""What is read of small and large tensors: the right bytes, in few reads, and within the stated bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.validate.samples import (
    REMOTE_READS,
    ROWS,
    TENSOR_BYTES,
    TOTAL_BYTES,
    Sample,
    Span,
    read_samples,
    read_spans,
)
from fixtures.counting import counted
from fixtures.weights import write_json, write_safetensors


def write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A folder of float32 tensors, every value its place in its tensor."""
    folder.mkdir()
    tensors = {name: (np.arange(np.prod(shape)).reshape(shape), "F32") for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", {"model_type": "x"})
    return folder


def rows_of(sample: Sample) -> list[int]:
    """The numbers of the rows that were read of a tensor of `write`."""
    values = np.frombuffer(sample.data, "<f4").reshape(sample.rows, -1)
    assert (values - values[:, :1] == np.arange(sample.columns)).all()
    return [int(first) // sample.columns for first in values[:, 0]]


@pytest.mark.parametrize("shape", [(3,), (), (2, 3), (128, 128), (4, 4, 8), (250_000,)])
def test_what_is_small_is_read_whole(tmp_path: Path, shape: tuple[int, ...]) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "made", {"a": shape}))
    (sample,) = read_samples(checkpoint, checkpoint.tensors.values())
    assert sample.whole
    assert sample.data == checkpoint.read(checkpoint.tensors["a"])
    assert sample.rows * sample.columns == np.prod(shape)


@pytest.mark.parametrize("shape", [(1000, 128), (65, 300), (40, 10, 90)])
def test_of_a_large_matrix_rows_from_the_first_to_the_last(tmp_path: Path, shape: tuple[int, ...]) -> None:
    checkpoint, storage = counted(write(tmp_path / "made", {"a": shape}))
    (sample,) = read_samples(checkpoint, checkpoint.tensors.values())
    rows, every = rows_of(sample), int(np.prod(shape[:-1]))
    assert not sample.whole
    assert len(set(rows)) == len(rows) == ROWS
    assert (rows[0], rows[-1]) == (0, every - 1)
    assert max(np.diff(rows)) <= every // 7 + 1
    assert len(storage.reads) <= 8


def test_wide_rows_stay_within_the_bound_of_a_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "made", {"a": (40, 100_000)}))
    (sample,) = read_samples(checkpoint, checkpoint.tensors.values())
    assert len(sample.data) <= TENSOR_BYTES
    assert rows_of(sample) == [0, 39]


def test_many_matrices_share_the_bound_of_all(tmp_path: Path) -> None:
    shapes = {f"layers.{n}.a": (80, 4096) for n in range(30)}
    checkpoint, storage = counted(write(tmp_path / "made", shapes))
    samples = read_samples(checkpoint, checkpoint.tensors.values())
    assert len(samples) == 30
    assert sum(storage.reads) <= TOTAL_BYTES


def test_empty_tensors_and_huge_vectors_give_nothing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "made", {"a": (0, 4), "b": (300_000,), "c": (2,)}))
    samples = read_samples(checkpoint, checkpoint.tensors.values())
    assert [sample.tensor.name for sample in samples] == ["c"]


def test_from_the_hub_few_requests_and_every_large_matrix_has_its_turn(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"layers.{n:03}.a": (600, 32) for n in range(100)}
    shapes |= {f"norms.{n:03}": (64,) for n in range(100)}
    checkpoint, storage = counted(write(tmp_path / "made", shapes), remote=True)
    samples = read_samples(checkpoint, checkpoint.tensors.values())
    large = [sample.tensor.name for sample in samples if not sample.whole]
    assert len(storage.reads) <= REMOTE_READS + 1
    assert len(samples) == REMOTE_READS + 100
    assert (large[0], large[-1]) == ("layers.000.a", "layers.099.a")


def test_neighbours_are_read_at_once_and_given_in_order(tmp_path: Path) -> None:
    checkpoint, storage = counted(write(tmp_path / "made", {"a": (10,), "b": (100_000,), "c": (10,)}))
    a, b, c = (checkpoint.tensors[name] for name in "abc")
    spans = [Span(c, 4, 12), Span(a, 0, 40), Span(b, 0, 8), Span(a, 8, 16), Span(c, 0, 40)]
    found = read_spans(checkpoint, spans)
    assert found == [checkpoint.read(span.tensor, span.begin, span.end) for span in spans]
    assert storage.reads[:2] == [48, 40]
