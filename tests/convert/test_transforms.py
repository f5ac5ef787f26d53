"""The transforms on small arrays: which bytes they give, in which pieces."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from draftpair.checkpoint import ITEM_BITS, TensorInfo
from draftpair.checkpoint.stored import Stored
from draftpair.convert.decode import read_rows
from draftpair.convert.plan import as_stored
from draftpair.convert.transforms import (
    TRANSFORMS,
    Place,
    Transform,
    copy,
    deinterleave_rows,
    drop,
    halve_rows,
    join_rows,
    split_kv_b,
    stack,
)
from draftpair.families import load_families


class Given(NamedTuple):
    """A piece of an output tensor, and whose rows it is made of."""

    source: Stored
    data: bytes


class Source:
    """Tensors in memory, and the largest range that was read."""

    def __init__(self, *arrays: np.ndarray, dtype: str = "BF16") -> None:
        self.data = {f"t{n}": array.tobytes() for n, array in enumerate(arrays)}
        tensors = [
            TensorInfo(f"t{n}", dtype, array.shape, "f", 100, 100 + array.nbytes)
            for n, array in enumerate(arrays)
        ]
        self.infos = [as_stored(tensor) for tensor in tensors]
        self.largest = 0

    def give(self, transform: Transform, place: Place, limit: int) -> list[Given]:
        """The pieces of a transform, each read and rearranged."""
        given = []
        for piece in transform(self.infos, place, limit):
            data = read_rows(self._bytes, piece.source, piece.begin, piece.end)
            data = piece.rearrange(data) if piece.rearrange else data
            assert piece.values * ITEM_BITS[piece.source.dtype] // 8 == len(data)
            given.append(Given(piece.source, data))
        return given

    def _bytes(self, tensor: TensorInfo, begin: int, end: int) -> bytes:
        self.largest = max(self.largest, end - begin)
        return self.data[tensor.name][begin:end]


def words(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype="<u2").reshape(shape)


@pytest.mark.parametrize("limit", [1, 24, 30, 1000])
def test_copy_gives_the_source_in_whole_rows(limit: int) -> None:
    source = Source(words(9, 6))
    pieces = source.give(copy, Place(0, (9, 6)), limit)
    assert b"".join(piece.data for piece in pieces) == words(9, 6).tobytes()
    assert all(len(piece.data) % 12 == 0 for piece in pieces)
    assert source.largest <= max(12, limit)


def test_a_vector_is_one_row() -> None:
    source = Source(words(100))
    (piece,) = source.give(copy, Place(0, (100,)), 7)
    assert piece.data == words(100).tobytes()


@pytest.mark.parametrize("limit", [1, 24, 1000])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "experts"])
def test_halve_rows_gives_each_matrix_its_half(lead: tuple[int, ...], limit: int) -> None:
    source = Source(words(*lead, 8, 5))
    halves = [
        b"".join(p.data for p in source.give(halve_rows, Place(part, (*lead, 4, 5)), limit))
        for part in (0, 1)
    ]
    assert halves[0] == words(*lead, 8, 5)[..., :4, :].tobytes()
    assert halves[1] == words(*lead, 8, 5)[..., 4:, :].tobytes()
    assert source.largest <= max(10, limit)


@pytest.mark.parametrize("limit", [1, 24, 40, 1000])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "experts"])
def test_deinterleave_rows_takes_the_even_rows_and_the_odd_ones(lead: tuple[int, ...], limit: int) -> None:
    source = Source(words(*lead, 8, 5))
    even, odd = (source.give(deinterleave_rows, Place(part, (*lead, 4, 5)), limit) for part in (0, 1))
    assert b"".join(piece.data for piece in even) == words(*lead, 8, 5)[..., 0::2, :].tobytes()
    assert b"".join(piece.data for piece in odd) == words(*lead, 8, 5)[..., 1::2, :].tobytes()
    assert all(len(piece.data) <= max(10, limit) for piece in (*even, *odd))
    assert source.largest <= max(20, limit)


def test_join_rows_puts_one_source_after_the_other() -> None:
    source = Source(words(3, 4), words(5, 4) + 50)
    pieces = source.give(join_rows, Place(0, (8, 4)), 16)
    assert b"".join(p.data for p in pieces) == words(3, 4).tobytes() + (words(5, 4) + 50).tobytes()
    assert [p.source.name for p in pieces] == ["t0"] * 2 + ["t1"] * 3


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_tensor_has_no_pieces(shape: tuple[int, ...]) -> None:
    source = Source(words(*shape))
    assert source.give(copy, Place(0, shape), 8) == []


def test_a_scalar_is_one_piece() -> None:
    source = Source(np.array(7, "<u2"))
    (piece,) = source.give(copy, Place(0, ()), 8)
    assert piece.data == b"\x07\x00"


def test_stack_puts_experts_in_order_and_says_whose_bytes_they_are() -> None:
    experts = [words(4, 2) + 100 * n for n in range(3)]
    source = Source(*experts)
    pieces = source.give(stack, Place(0, (3, 4, 2)), 8)
    assert b"".join(piece.data for piece in pieces) == np.stack(experts).tobytes()
    assert [piece.source.name for piece in pieces] == ["t0", "t0", "t1", "t1", "t2", "t2"]


@pytest.mark.parametrize(("dtype", "word"), [("BF16", "<u2"), ("F32", "<u4")])
def test_split_kv_b_follows_the_formula(dtype: str, word: str) -> None:
    heads, nope, value, rank = 3, 4, 5, 7
    joined = np.arange(heads * (nope + value) * rank, dtype=word).reshape(-1, rank)
    source = Source(joined, dtype=dtype)
    shapes = (heads, rank, nope), (heads, value, rank)
    embed, unembed = (
        np.frombuffer(b"".join(p.data for p in source.give(split_kv_b, Place(part, shape), 1)), word).reshape(
            shape
        )
        for part, shape in enumerate(shapes)
    )
    for h in range(heads):
        for c in range(rank):
            assert [embed[h, c, i] for i in range(nope)] == [
                joined[h * (nope + value) + i, c] for i in range(nope)
            ]
            assert [unembed[h, j, c] for j in range(value)] == [
                joined[h * (nope + value) + nope + j, c] for j in range(value)
            ]
    assert source.largest == max(nope, value) * rank * joined.itemsize


def test_drop_gives_and_reads_nothing() -> None:
    source = Source(words(3))
    assert source.give(drop, Place(0, (3,)), 8) == []
    assert source.largest == 0


def test_every_transform_a_record_names_exists() -> None:
    assert {
        rule.transform for family in load_families().values() for rule in family.rules
    } <= TRANSFORMS.keys()
