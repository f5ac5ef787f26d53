"""The hash that manifests record of tensor data: BLAKE3, 32 bytes, in hexadecimal.

A cryptographic hash, so that a manifest can prove that a tensor is the one that was written, and the only one of
them that keeps up with copying: SHA-256 takes longer than reading, checking, writing and reading back together.
Files that are not weights are small and keep SHA-256. `b3sum` prints the same digits.
"""

from __future__ import annotations

from typing import Protocol

ALGORITHM = "blake3"
"""What a manifest calls the hash."""


class TensorHash(Protocol):
    """A hash under way."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Takes the next bytes."""

    def hexdigest(self) -> str:
        """The hash of all bytes so far: 64 hexadecimal digits."""


def new_hash() -> TensorHash:
    """A hash of no bytes yet. Its `update` lets other threads run."""
    from blake3 import blake3

    return blake3()


def hash_of(data: bytes | bytearray | memoryview) -> str:
    """The hash of a whole tensor's data."""
    digest = new_hash()
    digest.update(data)
    return digest.hexdigest()
