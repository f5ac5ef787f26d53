"""Compares what a drafter's layout has no place for with what the drafter borrows in its stead.

Some releases repeat the target's embedding and output head inside the head. A copy may be left out only when it is
one: a head that was trained with rows of its own would draft wrongly with the target's, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.stored import Stored, find_stored
from draftpair.errors import Refused
from draftpair.families.heads import HeadMatch
from draftpair.findings import Finding

SAMPLES = 256
SAMPLE_BYTES = 4096


def left_out_copies(match: HeadMatch) -> list[Finding]:
    """A finding for each copy that is left out. Raises Refused, naming both, for one that is not the target's."""
    copies = [(m.sources[0], m.rule.copy_of) for m in match.matched if m.rule.copy_of]
    return [
        _compared(match.checkpoint, own, _original(match.checkpoint, names), names) for own, names in copies
    ]


def _original(checkpoint: Checkpoint, names: tuple[str, ...]) -> Stored | None:
    found = (find_stored(checkpoint.tensors, name, checkpoint.config) for name in names)
    return next((stored for stored in found if stored), None)


def _compared(
    checkpoint: Checkpoint, own: Stored, original: Stored | None, names: tuple[str, ...]
) -> Finding:
    if original is None:
        message = (
            f"{own.name} is left out: the drafter takes the target's {names[0]}, which is not here to compare"
        )
        hint = "split from the whole checkpoint to have the two compared"
        return Finding("SPLIT-COPY-UNCOMPARED", "warning", message, own.name, hint=hint)
    if not _same(checkpoint, own, original):
        raise Refused(
            f"{own.name} is not a copy of {original.name} ({own.detail} {list(own.shape)} and {original.detail} "
            f"{list(original.shape)}); the drafter's layout has no place for one of its own",
            hint="the head would draft with other rows than it was trained with; no engine on MLX can hold this head",
        )
    message = (
        f"{own.name} is left out: {original.name} of the target, which the drafter borrows, has its bytes"
    )
    return Finding("SPLIT-COPY-LEFT-OUT", "note", message, own.name)


def _same(checkpoint: Checkpoint, own: Stored, original: Stored) -> bool:
    """Whether both are stored alike and agree in every byte that is looked at: all of a small tensor, or samples."""
    mine, theirs = own.tensors, original.tensors
    if [(t.dtype, t.shape) for t in mine] != [(t.dtype, t.shape) for t in theirs]:
        return False
    return all(
        checkpoint.read(a, begin, end) == checkpoint.read(b, begin, end)
        for a, b in zip(mine, theirs, strict=True)
        for begin, end in _places(a.nbytes)
    )


def _places(size: int) -> Iterator[tuple[int, int]]:
    """At most `SAMPLES` stretches of `SAMPLE_BYTES` bytes, evenly spaced, the first and the last included."""
    count = min(SAMPLES, -(-size // SAMPLE_BYTES))
    for number in range(count):
        begin = (size - min(size, SAMPLE_BYTES)) * number // max(count - 1, 1)
        yield begin, min(begin + SAMPLE_BYTES, size)
