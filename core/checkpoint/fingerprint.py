"""What identifies a checkpoint across conversions: hashes of its headers, norms, sampled weights and config.

Quantization rewrites matrices and leaves norms alone, so a target that was quantized still has the norm
values of the raw checkpoint, while another fine-tune of the same shape has others. Samples of the matrices
notice a fine-tune that left the norms alone, without reading gigabytes.

Converters rename norms, cast them, and store those of some families as 1 + w. So each norm also has a short hash
of every form that a conversion may give it, under its name without what conversions wrap around names.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from draftpair.checkpoint.checkpoint import Checkpoint
from draftpair.checkpoint.dtypes import FLOAT_DTYPES, from_float32, to_float32
from draftpair.checkpoint.header import TensorInfo

if TYPE_CHECKING:
    import numpy as np

NORM_SUFFIX = "norm.weight"
SAMPLED_TENSORS = 256
SAMPLE_BYTES = 64
FORM_DIGITS = 16

# Modules that hold the whole language model: conversions add, drop and exchange them.
_WRAPPERS = frozenset({"model", "language_model", "text_model", "llm", "backbone", "transformer", "module"})
# A bfloat16 number of this size or more is a float16 number as well; smaller ones count as zero.
_FLOAT16_HOLDS = 2.0**-16
# With a file absent or unreadable, a hash over what is there would look like another model's.
_INCOMPLETE = frozenset({"FILE-HEADER", "FILE-DANGLING-LINK", "INDEX-SHARD-MISSING", "INDEX-TENSOR-ABSENT"})


def fingerprint(checkpoint: Checkpoint, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """The checkpoint's fingerprint; every hash is SHA-256 in hexadecimal.

    `headers_sha256` covers name, dtype and shape of every tensor. `norms_sha256` covers name, shape
    and values, as little-endian float32, of the tensors of rank one whose name ends in `norm.weight` and does not
    start with one of `exclude`, a head's prefixes, whatever is wrapped around either. `norms` has those tensors by
    `unwrapped` name (by their own where two would share one), each with the first 16 digits of the hashes of its
    `forms`, the stored one first. `samples_sha256` covers three times 64 bytes (first, middle, last) of at most 256
    other tensors, evenly spaced by name. Without any such tensor, or when a weight file is absent or damaged, `norms`
    is empty and the two hashes are None. `config_sha256` covers the bytes of config.json.
    """
    read = _Read(checkpoint, exclude)
    names = Counter(unwrapped(tensor.name) for tensor in read.norms)
    return {
        **read.hashes(),
        "norms": {
            unwrapped(t.name) if names[unwrapped(t.name)] == 1 else t.name: forms(to_float32(data, t.dtype))
            for t, data in zip(read.norms, read.norm_data, strict=True)
        },
    }


def exact_hashes(checkpoint: Checkpoint, exclude: Sequence[str] = ()) -> dict[str, str | None]:
    """The four hashes of a `fingerprint`, which are all it takes to tell the very same checkpoint."""
    return _Read(checkpoint, exclude).hashes()


class _Read:
    """What a fingerprint is made of, read once."""

    def __init__(self, checkpoint: Checkpoint, exclude: Sequence[str]) -> None:
        self.checkpoint = checkpoint
        self.tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: tensor.name)
        excluded = tuple(unwrapped(prefix) for prefix in exclude)
        whole = not is_incomplete(checkpoint)
        outside = [t for t in self.tensors if whole and not unwrapped(t.name).startswith(excluded)]
        self.norms = [tensor for tensor in outside if _is_norm(tensor)]
        self.norm_data = list(checkpoint.read_each((tensor, 0, tensor.nbytes) for tensor in self.norms))
        self.sampled = _spread([tensor for tensor in outside if len(tensor.shape) > 1])

    def hashes(self) -> dict[str, str | None]:
        """All that covers bytes as they are."""
        norms = zip(self.norms, self.norm_data, strict=True)
        has_config = self.checkpoint.has_file("config.json")
        return {
            "headers_sha256": _hash(map(_header_line, self.tensors)),
            "norms_sha256": _hash(_exactly(norms)) if self.norms else None,
            "samples_sha256": _hash(_samples(self.checkpoint, self.sampled)) if self.sampled else None,
            "config_sha256": _hash([self.checkpoint.read_bytes("config.json")]) if has_config else None,
        }


def unwrapped(name: str) -> str:
    """A tensor's name, or the start of one, without the modules around the language model.

    `model.language_model.layers.0.q_norm.weight` and `layers.0.q_norm.weight` are one; `mtp.norm.weight` stays.
    """
    module, dot, rest = name.partition(".")
    while dot and module in _WRAPPERS:
        name = rest
        module, dot, rest = name.partition(".")
    return name


def forms(values: np.ndarray) -> list[str]:
    """Short hashes of the values, of 1 + values, and of both in float16, where they differ; the values' own first.

    All are rounded to bfloat16, and what float16 cannot hold of that is zero. So casts among bfloat16, float16 and
    float32 change no hash of bfloat16 values, and a conversion's own hash is among the forms of what it converted.
    """
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        gains = values + np.float32(1)
        every = (values, gains, *(v.astype(np.float16).astype(np.float32) for v in (values, gains)))
    return list(dict.fromkeys(_short(form) for form in every))


def _short(values: np.ndarray) -> str:
    import numpy as np

    rounded = to_float32(from_float32(values, "BF16"), "BF16")
    rounded[np.abs(rounded) < _FLOAT16_HOLDS] = 0
    return _hash([rounded.astype("<f4").tobytes()])[:FORM_DIGITS]


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


def _exactly(norms: Iterable[tuple[TensorInfo, bytes]]) -> Iterator[bytes]:
    for tensor, data in norms:
        yield _line(tensor.name, tensor.shape)
        yield _as_float32(data, tensor.dtype)


def _as_float32(data: bytes, dtype: str) -> bytes:
    """The numbers as little-endian float32; for the two usual types without numpy, whose import takes longer."""
    if dtype == "F32":
        return data
    if dtype == "BF16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        return bytes(wide)
    return to_float32(data, dtype).astype("<f4").tobytes()


def _header_line(tensor: TensorInfo) -> bytes:
    """As `_line` has it; a name that needs no escapes is what a checkpoint has ten thousands of."""
    name = tensor.name
    if name.isascii() and name.isprintable() and not {'"', "\\"}.intersection(name):
        return f'["{name}", "{tensor.dtype}", {list(tensor.shape)}]\n'.encode()
    return _line(name, tensor.dtype, tensor.shape)


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def _line(*fields: Any) -> bytes:
    return _ENCODER.encode(fields).encode("utf-8") + b"\n"


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
