"""Streams the head's tensors into the weight file, which reads each piece back.

At most a few pieces of `PIECE_BYTES` a worker are in memory at once, whatever the size of a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from draftpair.checkpoint.dtypes import from_float32, nonfinite_count, to_float32
from draftpair.checkpoint.hashing import new_hash
from draftpair.checkpoint.wording import some
from draftpair.checkpoint.writer import TensorFile
from draftpair.convert.decode import read_rows
from draftpair.convert.parallel import Meter, in_turns
from draftpair.convert.plan import PlannedTensor, SplitPlan
from draftpair.convert.transforms import TRANSFORMS, Piece
from draftpair.errors import Refused
from draftpair.version import VERSION

PIECE_BYTES = 1 << 20
_SHOWN = 5


class _Piece(NamedTuple):
    """A piece of a planned tensor, and how many values of that tensor come before it."""

    stream: _Stream
    piece: Piece
    before: int


class _Made(NamedTuple):
    """What a piece became: the bytes of each output, how many values could not be written, whether all are zero."""

    parts: Sequence[bytes]
    nonfinite: int
    lost: int
    zero: bool


def write_weights(plan: SplitPlan, path: Path, meter: Meter) -> dict[str, str]:
    """Writes the weight file; returns the hash, in hexadecimal, of every tensor's data.

    Raises Refused when a value of the source is not finite, or too small for a quantization mode, naming every such
    tensor and how many there are, and for a norm of nothing but zeros.
    """
    metadata = {"format": "mlx", "draftpair_version": VERSION, "draftpair_family": plan.family.name}
    largest_first = sorted(plan.tensors, key=lambda tensor: -tensor.dense.nbytes)
    nonfinite: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    zero: list[str] = []
    with TensorFile(path, [output for output, _ in plan.outputs], metadata) as file:
        streams = [_Stream(plan, tensor, file) for tensor in largest_first]

        def hash_in_order(piece: _Piece, made: _Made) -> None:
            piece.stream.hash(made.parts)
            if made.nonfinite:
                source = piece.piece.source
                nonfinite[f"{source.name} in {source.tensors[0].file}"] += made.nonfinite
            if made.lost:
                lost[f"{piece.stream.tensor.name} ({piece.stream.tensor.quantization})"] += made.lost
            if made.zero:
                zero.append(piece.stream.tensor.name)
            meter.advance(piece.stream.nbytes(piece.piece))

        in_turns([s.pieces() for s in streams], lambda piece: piece.stream.write(piece), hash_in_order, meter)
        if nonfinite:
            raise _not_finite(nonfinite)
        if zero:
            raise Refused(
                f"norms that hold nothing but zeros: {some(sorted(zero))}",
                hint="the file may be damaged: compare its hash with the original repository's",
            )
        if lost:
            raise _lost(lost)
    return {name: digest for stream in streams for name, digest in stream.hashes()}


class _Stream:
    """One planned tensor on its way into the file."""

    def __init__(self, plan: SplitPlan, tensor: PlannedTensor, file: TensorFile) -> None:
        self.tensor = tensor
        self._plan, self._file = plan, file
        self._values = max(1, prod(tensor.shape))
        self._sinks = [(output, new_hash()) for output in tensor.outputs]

    def nbytes(self, piece: Piece) -> int:
        """The bytes of a piece before it is quantized."""
        return self.tensor.dense.nbytes * piece.values // self._values

    def pieces(self) -> Iterator[_Piece]:
        """The pieces of the tensor in their order."""
        tensor, before = self.tensor, 0
        for piece in TRANSFORMS[tensor.transform](tensor.sources, tensor.place, PIECE_BYTES):
            yield _Piece(self, piece, before)
            before += piece.values

    def write(self, job: _Piece) -> _Made:
        """Reads a piece, makes of it what is asked for, and writes that at its place."""
        tensor, source = self.tensor, job.piece.source
        data = read_rows(self._plan.checkpoint.read, source, job.piece.begin, job.piece.end)
        if job.piece.rearrange:
            data = job.piece.rearrange(data)
        bad = nonfinite_count(data, source.dtype)
        if source.dtype != tensor.dtype or tensor.added:
            values = to_float32(data, source.dtype)
            data = from_float32(values + tensor.added if tensor.added else values, tensor.dtype)
            bad = nonfinite_count(data, tensor.dtype)
        parts: Sequence[bytes] = [data]
        lost = 0
        if tensor.quantization:
            parts = tensor.quantization.rows(data, tensor.dtype, tensor.shape[-1])
            lost = tensor.quantization.lost_groups(parts[1])
        for (output, _), part in zip(self._sinks, parts, strict=True):
            # Every output has the same share of its bytes before this piece: pieces are whole rows.
            self._file.write(output.name, output.nbytes * job.before // self._values, part)
        # A vector is one piece.
        zero = len(tensor.shape) == 1 and "norm" in tensor.name and not any(data)
        return _Made(parts, bad, lost, zero)

    def hash(self, parts: Sequence[bytes]) -> None:
        """Takes the next piece into the hashes."""
        for (_, digest), part in zip(self._sinks, parts, strict=True):
            digest.update(part)

    def hashes(self) -> Iterator[tuple[str, str]]:
        """The names of the outputs with their hashes."""
        return ((output.name, digest.hexdigest()) for output, digest in self._sinks)


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
