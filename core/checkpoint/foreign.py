"""Tells what a file named like weights really is, when it turns out not to be safetensors.

Asked only after parsing failed: a valid header length can look like any of these signatures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """Another kind of file: how to call it, and what to do about it."""

    title: str
    hint: str


_CONVERT = "Convert it to safetensors first."
_SIGNATURES: tuple[tuple[tuple[bytes, ...], Foreign], ...] = (
    (
        (b"version https://git-lfs", b"version https://hawser"),
        Foreign("a Git LFS pointer", "Fetch the real file with `git lfs pull` or `hf download`."),
    ),
    (
        (b"<!doctype", b"<html", b"<?xml", b"<head"),
        Foreign("a web page", "A server answered with a page instead of the file: download it again."),
    ),
    ((b"gguf",), Foreign("a GGUF file", "draftpair reads safetensors; use the original checkpoint.")),
    ((b"pk\x03\x04",), Foreign("a zip archive (PyTorch saves its pickles so)", _CONVERT)),
    ((b"\x1f\x8b",), Foreign("a gzip archive", "Unpack it first.")),
    ((b"\x28\xb5\x2f\xfd",), Foreign("a zstd archive", "Unpack it first.")),
    ((b"\x93numpy",), Foreign("a numpy array file", _CONVERT)),
    ((b"\x89hdf",), Foreign("an HDF5 file", _CONVERT)),
    (tuple(bytes((0x80, protocol)) for protocol in range(2, 6)), Foreign("a Python pickle", _CONVERT)),
    ((b"{",), Foreign("a JSON text", "Look for the file that really holds the weights.")),
)


def recognise(prefix: bytes) -> Foreign | None:
    """What the first bytes of a file say it is, or None."""
    start = prefix[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for signatures, foreign in _SIGNATURES:
        if start.startswith(signatures):
            return foreign
    return None
