"""What identifies a checkpoint across conversions: hashes of its headers, its norms and its config.

Quantization rewrites matrices and leaves norms alone, so a target that was quantized still has the norm
values of the raw checkpoint, while another fine-tune of the same shape has others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from draftpair.checkpoint.checkpoint import Checkpoint
from draftpair.checkpoint.dtypes import FLOAT_DTYPES, to_float32
from draftpair.checkpoint.header import TensorInfo

NORM_SUFFIX = "norm.weight"


def fingerprint(checkpoint: Checkpoint, exclude_prefix: str | None = None) -> dict[str, Any]:
    """The checkpoint's fingerprint; every hash is SHA-256 in hexadecimal.

    `headers_sha256` covers name, dtype and shape of every tensor. `norms_sha256` covers name, shape
    and values, as little-endian float32, of the `norms` tensors of rank one whose name ends in
    `norm.weight` and does not start with `exclude_prefix`; it is None when there is no such tensor.
    `config_sha256` covers the bytes of config.json, None without one.
    """
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: tensor.name)
    norms = [t for t in tensors if _is_norm(t) and not (exclude_prefix and t.name.startswith(exclude_prefix))]
    has_config = checkpoint.has_file("config.json")
    return {
        "headers_sha256": _hash(_line(t.name, t.dtype, t.shape) for t in tensors),
        "norms_sha256": _hash(part for t in norms for part in _norm(checkpoint, t)) if norms else None,
        "norms": len(norms),
        "config_sha256": _hash([checkpoint.read_bytes("config.json")]) if has_config else None,
    }


def _is_norm(tensor: TensorInfo) -> bool:
    return len(tensor.shape) == 1 and tensor.name.endswith(NORM_SUFFIX) and tensor.dtype in FLOAT_DTYPES


def _norm(checkpoint: Checkpoint, tensor: TensorInfo) -> Iterable[bytes]:
    yield _line(tensor.name, tensor.shape)
    yield to_float32(checkpoint.read(tensor), tensor.dtype).astype("<f4").tobytes()


def _line(*fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8") + b"\n"


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
