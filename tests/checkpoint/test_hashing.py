"""The hash of tensor data, held against the published test vectors of BLAKE3."""

from __future__ import annotations

import pytest

from draftpair.checkpoint.hashing import ALGORITHM, hash_of, new_hash

# https://github.com/BLAKE3-team/BLAKE3/blob/master/test_vectors/test_vectors.json: input byte i is i % 251.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


def vector(length: int) -> bytes:
    return bytes(range(251)) * (length // 251) + bytes(range(length % 251))


@pytest.mark.parametrize("length", VECTORS)
def test_it_is_blake3(length: int) -> None:
    assert ALGORITHM == "blake3"
    assert hash_of(vector(length)) == VECTORS[length]


@pytest.mark.parametrize("piece", [1000, 1024, 65536])
def test_pieces_of_any_kind_give_the_hash_of_the_whole(piece: int) -> None:
    data = vector(102400)
    digest = new_hash()
    for place, begin in enumerate(range(0, len(data), piece)):
        part = data[begin : begin + piece]
        digest.update((bytes, bytearray, memoryview)[place % 3](part))
    assert digest.hexdigest() == VECTORS[102400]
