"""Streams the head's tensors into the weight file, and reads the file back.

At most a few pieces of `PIECE_BYTES` a worker are in memory at once, whatever the size of a tensor.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftpair.checkpoint.dtypes import from_float32, nonfinite_count, to_float32
from draftpair.checkpoint.header import TensorInfo, read_header
from draftpair.checkpoint.stored import Stored
from draftpair.checkpoint.writer import Output, TensorFile
from draftpair.convert.decode import read_rows
from draftpair.convert.parallel import Meter, in_parallel
from draftpair.convert.plan import PlannedTensor, SplitPlan
from draftpair.convert.transforms import TRANSFORMS
from draftpair.errors import Refused, ToolError
from draftpair.version import VERSION

PIECE_BYTES = 1 << 20
_SHOWN = 5


@dataclass
class _Streamed:
    """What came of one planned tensor: a hash for each tensor written, and what could not be written, counted."""

    hashes: dict[str, str] = field(default_factory=dict)
    nonfinite: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)


def write_weights(plan: SplitPlan, path: Path, meter: Meter) -> dict[str, str]:
    """Writes the weight file; returns the SHA-256, in hexadecimal, of every tensor's data.

    Raises Refused when a value of the source is not finite, or too small for a quantization mode, naming every such
    tensor and how many there are.
    """
    metadata = {"format": "mlx", "draftpair_version": VERSION, "draftpair_family": plan.family.name}
    largest_first = sorted(plan.tensors, key=lambda tensor: -tensor.dense.nbytes)
    total = _Streamed()
    with TensorFile(path, [output for output, _ in plan.outputs], metadata) as file:

        def stream(tensor: PlannedTensor) -> _Streamed:
            return _stream(plan, tensor, file, meter)

        for streamed in in_parallel(largest_first, stream, meter):
            total.hashes.update(streamed.hashes)
            total.nonfinite.update(streamed.nonfinite)
            total.lost.update(streamed.lost)
        if total.nonfinite:
            raise _not_finite(total.nonfinite)
        if total.lost:
            raise _lost(total.lost)
    return total.hashes


def _stream(plan: SplitPlan, tensor: PlannedTensor, file: TensorFile, meter: Meter) -> _Streamed:
    streamed = _Streamed()
    sinks = [_Sink(file, output) for output in tensor.outputs]

    def read(stored: Stored, begin: int, end: int) -> bytes:
        return read_rows(plan.checkpoint.read, stored, begin, end)

    for source, data in TRANSFORMS[tensor.transform](read, tensor.sources, tensor.place, PIECE_BYTES):
        bad = nonfinite_count(data, source.dtype)
        if source.dtype != tensor.dtype or tensor.added:
            values = to_float32(data, source.dtype)
            data = from_float32(values + tensor.added if tensor.added else values, tensor.dtype)
            bad = nonfinite_count(data, tensor.dtype)
        if bad:
            streamed.nonfinite[f"{source.name} in {source.tensors[0].file}"] += bad
        parts: Sequence[bytes] = [data]
        if tensor.quantization:
            parts = tensor.quantization.rows(data, tensor.dtype, tensor.shape[-1])
            if lost := tensor.quantization.lost_groups(parts[1]):
                streamed.lost[f"{tensor.name} ({tensor.quantization})"] += lost
        for sink, part in zip(sinks, parts, strict=True):
            sink.append(part)
        meter.advance(len(data))
    streamed.hashes = {sink.output.name: sink.digest.hexdigest() for sink in sinks}
    return streamed


class _Sink:
    """One output tensor being filled from its start."""

    def __init__(self, file: TensorFile, output: Output) -> None:
        self.output = output
        self.digest = hashlib.sha256()
        self._file = file
        self._offset = 0

    def append(self, data: bytes) -> None:
        self.digest.update(data)
        self._file.write(self.output.name, self._offset, data)
        self._offset += len(data)


def _not_finite(counts: Mapping[str, int]) -> Refused:
    return Refused(
        f"values that are NaN or infinite, or too large for the wanted dtype: {_listed(counts)}",
        hint="the file may be damaged: compare its hash with the original repository's",
    )


def _lost(counts: Mapping[str, int]) -> Refused:
    return Refused(
        "groups of values so close to zero that MLX's scale for them wraps around and they would be read back as huge "
        f"numbers: {_listed(counts)}",
        hint="keep these modules out with --q-override MODULE=none, or choose another --q-mode",
    )


def _listed(counts: Mapping[str, int]) -> str:
    found = sorted(counts.items())
    listed = ", ".join(f"{name} ({count})" for name, count in found[:_SHOWN])
    return listed + (f" and {len(found) - _SHOWN} more tensors" if len(found) > _SHOWN else "")


def read_back(outputs: Sequence[Output], path: Path, hashes: Mapping[str, str], meter: Meter) -> None:
    """Compares the written file with what was planned, and each tensor's data with the hash of what was written.

    Raises ToolError when they differ.
    """
    found = read_header(path).tensors
    wanted = {output.name: (output.dtype, output.shape) for output in outputs}
    if {name: (info.dtype, info.shape) for name, info in found.items()} != wanted:
        raise _damaged(path, "its header is not the one that was planned")
    largest_first = sorted(found.values(), key=lambda info: -info.nbytes)
    read = in_parallel(largest_first, lambda info: _hash_on_disk(path, info, meter), meter)
    for info, digest in zip(largest_first, read, strict=True):
        if digest != hashes[info.name]:
            raise _damaged(path, f"{info.name} reads back differently")


def _hash_on_disk(path: Path, info: TensorInfo, meter: Meter) -> str:
    digest, left = hashlib.sha256(), info.nbytes
    buffer = memoryview(bytearray(min(PIECE_BYTES, left)))
    with open(path, "rb", buffering=0) as file:
        file.seek(info.begin)
        while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
            digest.update(buffer[:count])
            left -= count
            meter.advance(count)
    return digest.hexdigest()


def _damaged(path: Path, what: str) -> ToolError:
    return ToolError(
        f"{path.name} was not stored as it was written: {what}", hint="check the disk, and run again"
    )
