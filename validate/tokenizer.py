"""Do two tokenizers give the same ids the same meaning? Decided from their files alone.

A drafter proposes ids and a target reads them, so equal vocabulary sizes prove nothing: every id must stand
for the same string. Merges (for Unigram: scores) are compared as well. Normalizer, pre-tokenizer, decoder, the
flags of added tokens and the model's settings are compared but reported apart: only the target's are ever used,
and libraries rewrite them when they save.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.wording import printable
from draftpair.validate.tokenizer_files import (
    PIPELINE,
    SPECIAL,
    Tokenizer,
    as_ids,
    optional_object,
)

Relation = Literal["identical", "padded", "different", "unknown"]

SHOWN = 5


@dataclass(frozen=True)
class IdDifference:
    """An id with the strings it stands for on either side; None where the id has no string."""

    id: int
    target: str | None
    drafter: str | None


@dataclass(frozen=True)
class TokenizerComparison:
    """The outcome of a comparison.

    ``relation``: ``identical``, every id stands for the same string and the merges agree; ``padded``, the
    same except that one side has more ids, all of them behind the last id of the other; ``different``; or
    ``unknown`` when the files do not tell. ``detail`` says it in words.
    ``sections`` names what made it different: vocabulary, added_tokens, merges, scores, model.
    ``pipeline`` names what else differs: normalizer, pre_tokenizer, decoder, model settings, added_tokens (which
    ids are added tokens, and their flags). ``special`` names the special
    tokens that tokenizer_config.json gives on both sides and gives differently.
    ``different`` has the first ids (at most 5) that differ, of ``different_ids``; padding is left out.
    """

    relation: Relation
    detail: str
    sections: tuple[str, ...] = ()
    pipeline: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    different: tuple[IdDifference, ...] = ()
    different_ids: int = 0


def compare(target: Tokenizer | None, drafter: Tokenizer | None) -> TokenizerComparison:
    """Compare two tokenizers that were read; None means that a side has no tokenizer file."""
    if target is None or drafter is None:
        sides = [side for side, given in (("target", target), ("drafter", drafter)) if given is None]
        return TokenizerComparison("unknown", f"no tokenizer file beside the {' and the '.join(sides)}")
    if target.pieces is None or drafter.pieces is None:
        return _compare_digests(target, drafter)
    if target is drafter:
        return TokenizerComparison("identical", _detail("identical", 0, (), (), target, drafter))
    numbers = _differing(target.pieces, drafter.pieces)
    padded = not numbers and target.length != drafter.length
    sections = _sections(target, drafter, numbers, padded)
    relation: Relation = "different" if sections else "padded" if padded else "identical"
    different = tuple(
        IdDifference(number, target.pieces.get(number), drafter.pieces.get(number))
        for number in islice(numbers, SHOWN)
    )
    return TokenizerComparison(
        relation=relation,
        detail=_detail(relation, len(numbers), different, sections, target, drafter),
        sections=sections,
        pipeline=_pipeline(target, drafter),
        special=_special(target, drafter),
        different=different,
        different_ids=len(numbers),
    )


def special_ids(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Special ids by the file and key that give them, such as ``generation_config.json eos_token_id``.

    The files of one release disagree (the end of a turn is often in generation_config.json only), so two
    checkpoints are to be compared key by key.
    """
    generation = optional_object(checkpoint, "generation_config.json")
    stated = {f"generation_config.json {name}_id": generation.get(f"{name}_id") for name in SPECIAL}
    stated |= {f"config.json {name}_id": checkpoint.config.get(f"{name}_id") for name in SPECIAL}
    ids = {key: as_ids(value) for key, value in stated.items()}
    return {key: numbers for key, numbers in ids.items() if numbers}


def _compare_digests(target: Tokenizer, drafter: Tokenizer) -> TokenizerComparison:
    """Files that are not read here: equal bytes are an equal tokenizer, other bytes say nothing."""
    if target.digest is None or target.digest != drafter.digest:
        reason = f"the contents of {target.file} and {drafter.file} cannot be compared"
        return TokenizerComparison("unknown", reason)
    return TokenizerComparison("identical", f"{target.file} is the same file on both sides")


def _differing(first: dict[int, str], second: dict[int, str]) -> list[int]:
    """Ids in ascending order with different strings, those behind the last id of either side left out."""
    if first == second:
        return []
    end = min(max(first, default=-1), max(second, default=-1))
    return sorted(n for n in {*first, *second} if n <= end and first.get(n) != second.get(n))


def _sections(target: Tokenizer, drafter: Tokenizer, numbers: list[int], padded: bool) -> tuple[str, ...]:
    """What differs beyond padding; a part that only one side's files describe is not compared."""
    found = []
    added = {*target.added, *drafter.added}
    if any(number not in added for number in numbers):
        found.append("vocabulary")
    if any(number in added for number in numbers):
        found.append("added_tokens")
    if target.kind and drafter.kind and target.kind != drafter.kind:
        found.append("model")
    elif not _rules_agree(target.rules, drafter.rules, padded):
        found.append("scores" if target.kind == "Unigram" else "merges")
    return tuple(found)


def _rules_agree(first: list[Any] | None, second: list[Any] | None, padded: bool) -> bool:
    """Whether two lists of merges or scores are equal or, for a padded vocabulary, one begins the other."""
    if first is None or second is None or first == second:
        return True
    shared = min(len(first), len(second))
    return padded and first[:shared] == second[:shared]


def _pipeline(target: Tokenizer, drafter: Tokenizer) -> tuple[str, ...]:
    mine, theirs = target.pipeline, drafter.pipeline
    if mine is None or theirs is None:
        return ()
    different = [part for part in PIPELINE if mine.get(part) != theirs.get(part)]
    return tuple(different if _same_added(target, drafter) else [*different, "added_tokens"])


def _same_added(target: Tokenizer, drafter: Tokenizer) -> bool:
    """Whether the ids that both have are added tokens on both sides, with the same flags."""
    end = min(target.length or 0, drafter.length or 0)
    mine, theirs = ({n: flags for n, flags in side.added.items() if n < end} for side in (target, drafter))
    return mine == theirs


def _special(target: Tokenizer, drafter: Tokenizer) -> tuple[str, ...]:
    mine, theirs = target.special, drafter.special
    return tuple(key for key in mine if key in theirs and mine[key] != theirs[key])


def _detail(
    relation: Relation,
    count: int,
    different: tuple[IdDifference, ...],
    sections: tuple[str, ...],
    target: Tokenizer,
    drafter: Tokenizer,
) -> str:
    if relation == "identical":
        return f"all {target.length:,} ids stand for the same strings"
    if relation == "padded":
        return (
            f"{target.length:,} ids in the target, {drafter.length:,} in the drafter, all shared ones equal"
        )
    if not count:
        return f"the ids agree, but the {' and the '.join(sections)} differ"
    first = different[0]
    example = (
        f"id {first.id} is {_quoted(first.target)} in the target and {_quoted(first.drafter)} in the drafter"
    )
    return f"{count:,} ids stand for different strings: {example}"


def _quoted(piece: str | None) -> str:
    return "no token" if piece is None else f'"{printable(piece, 40)}"'
