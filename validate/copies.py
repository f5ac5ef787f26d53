"""Whether a drafter's own embedding and output matrix are the target's, by their values.

A drafter that carries a copy could borrow the target's; one that carries another needs its own. Names and shapes
are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, ConfigView, TensorInfo, from_float32, to_float32
from draftpair.checkpoint.packings.candidate import UNUSED
from draftpair.checkpoint.stored import Stored, UnknownPacking, find_stored
from draftpair.families.record import Family
from draftpair.validate.samples import Span, is_remote, read_spans, row_count
from draftpair.validate.vocabulary import ROLES, find_matrix

Relation = Literal["equal", "different", "unknown", "borrowed"]

WHOLE_BYTES = 1 << 20
ROWS, REMOTE_ROWS = 64, 16
"""Rows that are compared of a matrix larger than `WHOLE_BYTES`; from the Hub each is a request to either side."""

# What maps the rows of a smaller vocabulary to the target's ids.
_MAPS = ("d2t", "t2d")


class _Matrix(NamedTuple):
    """A matrix of one side, or why it cannot be compared; `tied`: an output matrix that is the embedding."""

    checkpoint: Checkpoint
    stored: Stored | None
    problem: str | None
    tied: bool


def copies(target: Checkpoint, drafter: Checkpoint, family: Family, config: ConfigView) -> dict[str, Any]:
    """For ``embedding`` and ``head``: whether the drafter has its ``own``, and its ``relation`` to the target's.

    ``borrowed`` when it has none and takes the target's. ``equal`` when all compared bytes, or numbers where the
    dtypes differ, are the target's: the whole of small matrices, `ROWS` rows of others, half of them among the first
    sixteenth. ``unknown`` when one side has none, or they are packed differently. ``detail`` says what was compared,
    or why it was not. ``config`` is the drafter's, under the family's keys.
    """
    return {role: _copy(target, drafter, family, config, role) for role in ROLES}


def _copy(
    target: Checkpoint, drafter: Checkpoint, family: Family, config: ConfigView, role: str
) -> dict[str, Any]:
    if role in family.borrows(drafter.tensors):
        return {"own": False, "relation": "borrowed", "detail": None}
    own = _matrix(drafter, config, role, _own_name(drafter, family, role))
    if own.stored is None and own.problem is None:
        return {"own": False, "relation": "unknown", "detail": f"the drafter has no {_WORDS[role]}"}
    relation, detail = _relation(_matrix(target, target.config, role, None), own, role)
    if own.tied:
        detail = "; ".join(filter(None, ("the drafter's is tied to its embedding", detail)))
    return {"own": True, "relation": relation, "detail": detail}


_WORDS = {"embedding": "embedding", "head": "output matrix"}


def _own_name(drafter: Checkpoint, family: Family, role: str) -> str | None:
    """What the record calls the drafter's own, where that is there."""
    outputs = (output.name for rule in family.rules if rule.role == role for output in rule.outputs)
    return next(
        (name for output in outputs if (name := output.format(layer=0, tap=0)) in drafter.tensors), None
    )


def _matrix(checkpoint: Checkpoint, config: ConfigView, role: str, name: str | None) -> _Matrix:
    name = name or find_matrix(checkpoint, role)
    tied = name is None and role == "head"
    if tied:
        name = find_matrix(checkpoint, "embedding")
    if name is None:
        return _Matrix(checkpoint, None, None, False)
    try:
        return _Matrix(checkpoint, find_stored(checkpoint.tensors, name, config), None, tied)
    except UnknownPacking as problem:
        return _Matrix(checkpoint, None, problem.message, tied)


def _relation(mine: _Matrix, own: _Matrix, role: str) -> tuple[Relation, str | None]:
    for side, matrix in (("target", mine), ("drafter", own)):
        if matrix.stored is None:
            return "unknown", matrix.problem or f"the {side} has no {_WORDS[role]}"
    one, other = mine.stored, own.stored
    if one is None or other is None or one.columns != other.columns:
        widths = [stored.columns for stored in (one, other) if stored]
        return (
            "unknown",
            f"rows of {widths[0]} in the target and of {widths[-1]} in the drafter: it is no copy",
        )
    if one.rows != other.rows and any(name in own.checkpoint.tensors for name in _MAPS):
        return "unknown", f"the drafter's {other.rows} rows are those of a vocabulary of its own"
    if one.packing != other.packing or (one.encoding != other.encoding):
        return "unknown", f"stored as {_form(one)} in the target and as {_form(other)} in the drafter"
    return _compared(mine.checkpoint, one, own.checkpoint, other)


def _form(stored: Stored) -> str:
    return stored.detail if stored.packing else stored.dtype


def _compared(
    target: Checkpoint, one: Stored, drafter: Checkpoint, other: Stored
) -> tuple[Relation, str | None]:
    """What a comparison of the weights and of what lies beside them comes to, on the rows that both have."""
    rows = different = 0
    whole = True
    parts, others = _parts(one), _parts(other)
    if parts.keys() != others.keys():
        return (
            "unknown",
            f"stored with {', '.join(parts)} in the target and with {', '.join(others)} in the drafter",
        )
    for role, mine in parts.items():
        theirs = others[role]
        if mine.shape[1:] != theirs.shape[1:] or (len(mine.shape) < 2 and mine.shape != theirs.shape):
            return "unknown", f"{mine.name} and {theirs.name} have other shapes"
        shared = min(row_count(mine), row_count(theirs)) or 1
        chosen = _rows(max(mine.nbytes, theirs.nbytes), shared, is_remote(target) or is_remote(drafter))
        pairs = zip(_read(target, mine, chosen), _read(drafter, theirs, chosen), strict=True)
        apart = sum(not _same(a, mine.dtype, b, theirs.dtype) for a, b in pairs)
        if role == _WEIGHT:
            rows, whole = len(chosen), len(chosen) == shared
        different = max(different, apart)
    said = [] if whole else [f"{rows:,} of {one.rows:,} rows compared"]
    if one.rows != other.rows:
        said.append(f"{one.rows:,} rows in the target and {other.rows:,} in the drafter")
    if one.dtype != other.dtype:
        said.append(f"{one.dtype} in the target and {other.dtype} in the drafter")
    if different:
        said.insert(0, f"{different:,} of {rows:,} rows differ")
    return ("different" if different else "equal"), "; ".join(said) or None


_WEIGHT = "weight"


def _parts(stored: Stored) -> dict[str, TensorInfo]:
    """The tensors that say what the matrix holds, by what they are: the weight and what lies beside it."""
    sides = zip(stored.roles, stored.tensors[1:], strict=True)
    return {_WEIGHT: stored.tensors[0], **{role: tensor for role, tensor in sides if role != UNUSED}}


def _rows(size: int, shared: int, remote: bool) -> list[int]:
    """All rows of a small tensor, else some: the first ids of a vocabulary are those that training changes most."""
    most = REMOTE_ROWS if remote else ROWS
    if size <= WHOLE_BYTES or shared <= most:
        return list(range(shared))
    half, early = most // 2, max(1, shared // 16)
    chosen = {early * place // half for place in range(half)}
    return sorted(chosen | {(shared - 1) * (place + 1) // half for place in range(half)})


def _read(checkpoint: Checkpoint, tensor: TensorInfo, rows: list[int]) -> Iterator[bytes]:
    row = tensor.nbytes // (row_count(tensor) or 1)
    yield from read_spans(checkpoint, [Span(tensor, number * row, (number + 1) * row) for number in rows])


def _same(one: bytes, dtype: str, other: bytes, others: str) -> bool:
    """Whether two rows are the same bytes, or one the other rounded to its dtype."""
    if dtype == others:
        return one == other
    if not {dtype, others} <= PLAIN_DTYPES:
        return False
    return (
        from_float32(to_float32(one, dtype), others) == other
        or from_float32(to_float32(other, others), dtype) == one
    )
