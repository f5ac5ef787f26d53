"""What identifies a checkpoint across conversions: hashes of its headers, norms, sampled weights and config.

Quantization rewrites matrices and leaves norms alone, so a target that was quantized still has the norm
values of the raw checkpoint, while another fine-tune of the same shape has others. Samples of the matrices
notice a fine-tune that left the norms alone, without reading gigabytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from draftpair.checkpoint.checkpoint import Checkpoint
from draftpair.checkpoint.dtypes import FLOAT_DTYPES, to_float32
from draftpair.checkpoint.header import TensorInfo

NORM_SUFFIX = "norm.weight"
SAMPLED_TENSORS = 256
SAMPLE_BYTES = 64

# With a file absent or unreadable, a hash over what is there would look like another model's.
_INCOMPLETE = frozenset({"FILE-HEADER", "FILE-DANGLING-LINK", "INDEX-SHARD-MISSING", "INDEX-TENSOR-ABSENT"})


def fingerprint(checkpoint: Checkpoint, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """The checkpoint's fingerprint; every hash is SHA-256 in hexadecimal.

    `headers_sha256` covers name, dtype and shape of every tensor. `norms_sha256` covers name, shape
    and values, as little-endian float32, of the `norms` tensors of rank one whose name ends in
    `norm.weight` and does not start with one of `exclude`, a head's prefixes. `samples_sha256` covers three
    times 64 bytes (first, middle, last) of at most 256 other tensors, evenly spaced by name. Both are None when
    there is no such tensor, or when a weight file is absent or damaged. `config_sha256` covers the bytes of
    config.json.
    """
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: tensor.name)
    outside = [t for t in tensors if not t.name.startswith(tuple(exclude))]
    whole = not is_incomplete(checkpoint)
    norms = [t for t in outside if whole and _is_norm(t)]
    sampled = _spread([t for t in outside if whole and len(t.shape) > 1])
    has_config = checkpoint.has_file("config.json")
    return {
        "headers_sha256": _hash(_line(t.name, t.dtype, t.shape) for t in tensors),
        "norms_sha256": _hash(_norms(checkpoint, norms)) if norms else None,
        "norms": len(norms),
        "samples_sha256": _hash(_samples(checkpoint, sampled)) if sampled else None,
        "config_sha256": _hash([checkpoint.read_bytes("config.json")]) if has_config else None,
    }


def is_incomplete(checkpoint: Checkpoint) -> bool:
    """Whether a weight file, or a tensor the index names, is absent or unreadable."""
    return any(finding.level == "error" and finding.rule in _INCOMPLETE for finding in checkpoint.findings)


def _spread(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """At most `SAMPLED_TENSORS` of them, evenly spaced, the first and the last included."""
    last, steps = len(tensors) - 1, min(len(tensors), SAMPLED_TENSORS) - 1
    return [tensors[place * last // max(steps, 1)] for place in range(steps + 1)]


def _samples(checkpoint: Checkpoint, tensors: Sequence[TensorInfo]) -> Iterable[bytes]:
    sizes = [min(SAMPLE_BYTES, tensor.nbytes) for tensor in tensors]
    samples = checkpoint.read_each(
        (tensor, begin, begin + size)
        for tensor, size in zip(tensors, sizes, strict=True)
        for begin in (0, (tensor.nbytes - size) // 2, tensor.nbytes - size)
    )
    for tensor in tensors:
        yield _line(tensor.name)
        yield from islice(samples, 3)


def _is_norm(tensor: TensorInfo) -> bool:
    return len(tensor.shape) == 1 and tensor.name.endswith(NORM_SUFFIX) and tensor.dtype in FLOAT_DTYPES


def _norms(checkpoint: Checkpoint, tensors: Sequence[TensorInfo]) -> Iterable[bytes]:
    wanted = ((tensor, 0, tensor.nbytes) for tensor in tensors)
    for tensor, data in zip(tensors, checkpoint.read_each(wanted), strict=True):
        yield _line(tensor.name, tensor.shape)
        yield to_float32(data, tensor.dtype).astype("<f4").tobytes()


def _line(*fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8") + b"\n"


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
