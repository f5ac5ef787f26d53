"""Recognises a head inside a target's checkpoint: one decision, shared by inspect and split-mtp.

The tensors decide. The config is only compared: a declared head that is not there, and a head that is
there and not declared, are both findings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from draftpair.checkpoint import Checkpoint, ConfigView, TensorInfo
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.checkpoint.stored import Stored, UnknownPacking, find_stored
from draftpair.families import load_records, load_splits
from draftpair.families.head_findings import (
    as_written,
    depth_findings,
    flag_finding,
    listed_tensors,
    packed,
    several,
    shape_findings,
)
from draftpair.families.locate import Place, places
from draftpair.families.record import Family, Record, SplitFamily
from draftpair.families.specs import TensorRule
from draftpair.findings import Finding, has_errors

# Where heads of families without a record are known to live; only used to say that something is there.
_ELSEWHERE = re.compile(r"^(?:(?:model|language_model)\.)*mtp(?:_layers|_block)?\.")


@dataclass(frozen=True)
class MatchedTensor:
    """A rule, and the tensors it matched in the head's layer number ``layer``, counted from 0."""

    rule: TensorRule
    layer: int
    sources: tuple[Stored, ...]


@dataclass(frozen=True)
class HeadMatch:
    """A head found in ``checkpoint``: what belongs to it, what is missing, what does not belong.

    ``config`` is the checkpoint's, with the flags that its tensors contradict set right.
    """

    checkpoint: Checkpoint
    config: ConfigView
    family: SplitFamily
    place: Place
    layers_declared: int | None
    tensors: tuple[TensorInfo, ...]
    matched: tuple[MatchedTensor, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the head's layers in the checkpoint."""
        return self.place.layers

    @property
    def prefix(self) -> str:
        """What the names of the head's tensors, or of those of its first layer, start with."""
        return self.place.prefixes[0]

    @property
    def layers_found(self) -> int:
        """How many head layers carry tensors."""
        return len(self.place.layers)

    @property
    def complete(self) -> bool:
        """Whether every tensor is there with the right shape, and nothing else."""
        return not has_errors(self.findings)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the head's tensors, from the headers."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def files(self) -> set[str]:
        """The files that hold the head, or a tensor of the target that its drafter has a copy of."""
        matched = (tensor for m in self.matched for stored in m.sources for tensor in stored.tensors)
        return {tensor.file for tensor in (*self.tensors, *matched)}


@dataclass(frozen=True)
class RecognisedHead:
    """A head that is recognised and not split: its record, or None, its prefix and its tensors."""

    record: Record | None
    prefix: str
    layers_found: int | None
    tensors: tuple[TensorInfo, ...]


@per_checkpoint
def find_head(checkpoint: Checkpoint) -> HeadMatch | None:
    """The head of a family that can be split, or None when no tensor of one is there.

    Structure comes first: layers that carry a family's marker tensors. Families may share markers, so
    ``model_type`` picks among those found; it never makes a head out of nothing.
    """
    for family in load_splits().values():
        if family.serves(checkpoint.config) and (found := places(checkpoint, family)):
            return _match(checkpoint, family, found)
    return None


def declared_depth(checkpoint: Checkpoint) -> tuple[Record, str, int] | None:
    """The record, the key and the number of head layers that config.json promises, None when it promises none."""
    for record in load_records().values():
        declared = record.head.declared_depth(checkpoint.config) if record.head else None
        if record.serves(checkpoint.config) and declared and type(declared[1]) is int and declared[1] > 0:
            return record, *declared
    return None


def recognised_head(checkpoint: Checkpoint) -> RecognisedHead | None:
    """A head that `find_head` does not give: of a family that is not split, or of none with a record.

    Without a record two layouts are noticed: a name that starts with ``mtp.`` or the like, and a layer
    that carries a fusion projection ``eh_proj``.
    """
    for record in load_records().values():
        if record.serves(checkpoint.config) and (found := places(checkpoint, record)):
            (place, *_) = found
            return RecognisedHead(record, place.prefixes[0], len(place.layers), place.tensors(checkpoint))
    named = [t for t in checkpoint.tensors.values() if _ELSEWHERE.match(t.name)]
    if named:
        match = _ELSEWHERE.match(named[0].name)
        return RecognisedHead(None, match.group() if match else "mtp.", None, tuple(named))
    fusion = next(
        (name for name in checkpoint.tensors if re.search(r"\.layers\.[0-9]+\.eh_proj\.", name)), None
    )
    if fusion is None:
        return None
    prefix = fusion[: fusion.index("eh_proj")]
    tensors = tuple(t for t in checkpoint.tensors.values() if t.name.startswith(prefix))
    return RecognisedHead(None, prefix, None, tensors)


@dataclass
class _Matching:
    """What comes out of holding the tensors against the rules."""

    matched: list[MatchedTensor] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unknown: dict[str, UnknownPacking] = field(default_factory=dict)


def _match(checkpoint: Checkpoint, family: SplitFamily, found: list[Place]) -> HeadMatch:
    place = found[0]
    tensors = place.tensors(checkpoint)
    flags = _contradicted_flags(checkpoint, family, place, tensors)
    config = checkpoint.config.having(flags)
    outcome = _Matching()
    for prefix, position, rules in _scopes(family, place):
        _match_scope(checkpoint, config, family, prefix, position, rules, outcome)
    # What lies beside a tensor that is not understood is not understood either.
    hidden = tuple(name.removesuffix("weight") for name in outcome.unknown)
    unexpected = tuple(
        sorted(
            t.name
            for t in tensors
            if t.name not in outcome.known and not (hidden and t.name.startswith(hidden))
        )
    )
    declared = family.head.declared_depth(config)
    prefix = place.prefixes[0]
    findings = [
        *several(found),
        *depth_findings(family, config, place),
        *(flag_finding(checkpoint.config, key, value) for key, value in flags.items()),
        *packed(prefix, outcome.unknown, checkpoint),
        *listed_tensors(
            "HEAD-TENSOR-MISSING",
            "the head lacks",
            outcome.missing,
            prefix,
            f"split from {family.target.source}",
        ),
        *listed_tensors(
            "HEAD-TENSOR-UNEXPECTED",
            f"the {family.name} record does not know",
            unexpected,
            prefix,
            "a tensor that is not understood cannot be carried over; compare with the original repository",
        ),
        *(f for m in outcome.matched for f in shape_findings(m.rule, m.sources, family, config)),
    ]
    return HeadMatch(
        checkpoint=checkpoint,
        config=config,
        family=family,
        place=place,
        layers_declared=declared[1] if declared and type(declared[1]) is int else None,
        tensors=tensors,
        matched=tuple(outcome.matched),
        missing=tuple(outcome.missing),
        unexpected=unexpected,
        findings=tuple(findings),
    )


def _contradicted_flags(
    checkpoint: Checkpoint, family: SplitFamily, place: Place, head: tuple[TensorInfo, ...]
) -> dict[str, bool]:
    """The flags of config.json that the head's tensors contradict, with what the tensors say.

    Where the decoder layers have such tensors and the head has none, it is the head that lacks them.
    """
    start = place.spec.layer_prefix(place.prefix, place.layers[0])
    inside = {tensor.name for tensor in head}
    contradicted = {}
    for key, names in family.flags.items():
        present = any(start + name in inside for name in names)
        ends = tuple(f".{name}" for name in names)
        around = any(name.endswith(ends) for name in checkpoint.tensors if name not in inside)
        if present != bool(family.number(key, checkpoint.config)) and (present or not around):
            contradicted[key] = present
    return contradicted


def _scopes(family: SplitFamily, place: Place) -> Iterator[tuple[str, int, list[TensorRule]]]:
    """The rules of the head as a whole, then those of each of its layers: prefix, position, rules."""
    once = [rule for rule in family.rules if rule.per != "layer"]
    each = [rule for rule in family.rules if rule.per == "layer"]
    if once:
        yield place.prefix, 0, once
    for position, layer in enumerate(place.layers if each else ()):
        yield place.spec.layer_prefix(place.prefix, layer), position, each


def _match_scope(
    checkpoint: Checkpoint,
    config: ConfigView,
    family: SplitFamily,
    prefix: str,
    position: int,
    rules: list[TensorRule],
    outcome: _Matching,
) -> None:
    rules = [rule for rule in rules if wanted(rule, family, config)]
    names = {
        rule: [("" if rule.per == "target" else prefix) + name for name in source_names(rule, family, config)]
        for rule in rules
    }
    stored: dict[str, Stored] = {}
    for name in dict.fromkeys(name for group in names.values() for name in group):
        try:
            if here := find_stored(checkpoint.tensors, name, config):
                stored[name] = here
        except UnknownPacking as problem:
            outcome.unknown[name] = problem
    present = stored.keys() | outcome.unknown.keys()

    def fits(rule: TensorRule) -> bool:
        shapes = [family.resolve(source.shape, config) if source.shape else None for source in rule.sources]
        every = shapes if rule.repeat is None else shapes * len(names[rule])
        written = as_written(rule, family, config)
        return all(
            name not in stored or shape is None or stored[name].shape in (shape, *written)
            for name, shape in zip(names[rule], every, strict=True)
        )

    for rule in chosen(rules, lambda rule: any(name in present for name in names[rule]), fits):
        absent = [name for name in names[rule] if name not in present]
        outcome.known.update(t.name for name in names[rule] if name in stored for t in stored[name].tensors)
        if all(name in stored for name in names[rule]):
            outcome.matched.append(MatchedTensor(rule, position, tuple(stored[name] for name in names[rule])))
        elif not rule.optional or len(absent) < len(names[rule]):
            outcome.missing += absent


def wanted(rule: TensorRule, family: Family, config: ConfigView) -> bool:
    """Whether the config leaves room for the tensor: no factor of its shape is zero."""
    return all(
        named.shape is None or 0 not in family.resolve(named.shape, config)
        for named in rule.sources or rule.outputs
    )


def source_names(rule: TensorRule, family: Family, config: ConfigView) -> tuple[str, ...]:
    """The names a rule stands for, below the prefix: those of its sources, or one an expert."""
    if rule.repeat is None:
        return tuple(source.name for source in rule.sources)
    return tuple(rule.source.format(expert=e) for e in range(family.count(rule.repeat, config)))


def chosen(
    rules: list[TensorRule], is_present: Callable[[TensorRule], bool], fits: Callable[[TensorRule], bool]
) -> list[TensorRule]:
    """The rules without the alternatives that the tensors did not take.

    For each question the first alternative wins whose tensors that are there all have its shapes, so that
    alternatives may share names; without one, the first with a tensor present; when none has one, the first
    alternative stays, so that its tensors are reported missing.
    """
    questions: dict[str, dict[str, list[TensorRule]]] = {}
    for rule in rules:
        if rule.choice:
            question, alternative = rule.choice.split(":")
            questions.setdefault(question, {}).setdefault(alternative, []).append(rule)

    def distance(alternative: list[TensorRule]) -> int:
        here = [rule for rule in alternative if is_present(rule)]
        return 0 if here and all(map(fits, here)) else 1 if here else 2

    taken = {id(rule) for found in questions.values() for rule in min(found.values(), key=distance)}
    return [rule for rule in rules if rule.choice is None or id(rule) in taken]
